"""Each field of each message of the handshake, changed on its way or wrong from the start, is refused.

A man in the middle stands between two nodes: the source advertises his address. He knows the messages and not the
secret. What he changes before the secret is proved makes the proofs differ; behind that, a frame's code. And the
frames of the native core, which follow, are of the version that was negotiated, or end the connection.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from helpers import dialect_0
from helpers.processes import wait_until
from helpers.tagged_pool import TaggedPool

from kvlink import wire
from kvlink.errors import AuthenticationFailed, KvlinkError, PeerLost, ProtocolError, VersionMismatch

SECRET = "swordfish"
PATIENCE_S = 5.0
NATIVE_HEADER_BYTES = 40
#: Where the header of a native frame has its dialect.
DIALECT_OFFSET = 5
#: What each side says, in order.
SPOKEN = {
    "dialer": (wire.Hello, wire.Proof, wire.IntroduceTarget),
    "acceptor": (wire.Challenge, wire.Proof, wire.IntroduceSource, wire.Welcome),
}
SEALED = (wire.IntroduceTarget, wire.IntroduceSource, wire.Welcome)
MESSAGES = (wire.Hello, wire.Challenge, wire.Proof, *SEALED, wire.Refuse)
CHANGES = [
    pytest.param(side, number, field, id=f"{side}-{kind.__name__}-{field}")
    for side, kinds in SPOKEN.items()
    for number, kind in enumerate(kinds)
    for field in kind.__struct_fields__
]


def changed(value: Any) -> Any:
    """Another value of the same type and length."""
    if isinstance(value, bytes):
        return value[:-1] + bytes([value[-1] ^ 1]) if value else b"x"
    if isinstance(value, str):
        return value[:-1] + ("x" if value[-1:] != "x" else "y")
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return [changed(one) for one in value] if value else [0]


class Middle:
    """Passes one connection on, both ways, and changes one field of one message."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.goes_to = ""
        self.change: tuple[str, int, str] | None = None
        self.changed = 0
        self.native_dialects: set[tuple[str, int]] = set()  # of the frames that came by, and who sent them
        self.change_dialect = ""  # of the native frames of this side
        self.heard: list[bytes] = []  # what the dialer said on the last connection
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []
        self._run(self._accept)

    def _run(self, work: Any, *args: Any) -> None:
        self._threads.append(threading.Thread(target=work, args=args))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                dialer, _ = self._listener.accept()
                host, _, port = self.goes_to.rpartition(":")
                acceptor = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
                self._sockets += [dialer, acceptor]
                self.heard = []
                self._run(self._pass_on, "dialer", dialer, acceptor)
                self._run(self._pass_on, "acceptor", acceptor, dialer)

    def _pass_on(self, side: str, read: socket.socket, write: socket.socket) -> None:
        with contextlib.suppress(OSError), read.makefile("rb") as stream:
            for number in range(len(SPOKEN[side])):
                prefix = stream.read(4)
                if len(prefix) < 4:
                    break
                body = stream.read(struct.unpack("<I", prefix)[0])
                if side == "dialer":
                    self.heard.append(prefix + body)
                if self.change is not None and self.change[:2] == (side, number):
                    body = self._change(body, SPOKEN[side][number], self.change[2])
                write.sendall(struct.pack("<I", len(body)) + body)
            while header := bytearray(stream.read(NATIVE_HEADER_BYTES)):  # the native core speaks
                self.native_dialects.add((side, header[DIALECT_OFFSET]))
                header[DIALECT_OFFSET] ^= side == self.change_dialect
                write.sendall(header + stream.read(struct.unpack_from("<I", header)[0]))
        with contextlib.suppress(OSError):
            write.shutdown(socket.SHUT_WR)

    def _change(self, body: bytes, kind: Any, field: str) -> bytes:
        code = 32 if kind in SEALED else 0
        message = wire.decode(body[: len(body) - code], kind)
        if isinstance(message, wire.Refuse):
            return body
        self.changed += 1
        replaced = msgspec.structs.replace(message, **{field: changed(getattr(message, field))})
        return wire.encode(replaced) + body[len(body) - code :]

    def close(self) -> None:
        for one in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join(timeout=PATIENCE_S)
            assert not thread.is_alive()


class Met:
    """Two nodes with a man in the middle, who may be honest."""

    def __init__(self) -> None:
        self.middle = Middle()
        self.source = TaggedPool(
            name="source", blocks=2, block_bytes=4096, secret=SECRET, advertise=self.middle.address
        )
        running: Any = self.source.node._running
        host, port = running.acceptor._listener.getsockname()[:2]
        self.middle.goes_to = f"{host}:{port}"
        self.target = TaggedPool(name="target", blocks=2, block_bytes=4096, secret=SECRET)

    def hand_over(self) -> KvlinkError | None:
        """One handoff over a connection of its own; returns why it failed."""
        self.target.node.drop_peer("source")
        offer = self.source.node.offer(blocks=[0], num_tokens=1, ttl_s=PATIENCE_S)
        pull = self.target.node.pull(offer.ticket, blocks=[1], deadline_s=PATIENCE_S)
        assert pull.wait_released(timeout_s=2 * PATIENCE_S)
        offer.cancel()
        assert offer.wait_released(timeout_s=PATIENCE_S)
        return pull.error

    def close(self) -> None:
        self.target.close()
        self.source.close()
        self.middle.close()


@pytest.fixture(scope="module")
def met() -> Iterator[Met]:
    found = Met()
    yield found
    found.close()


@pytest.mark.expects_warnings
@pytest.mark.parametrize(("side", "number", "field"), CHANGES)
def test_a_field_changed_on_its_way_is_refused(met: Met, side: str, number: int, field: str) -> None:
    kind = SPOKEN[side][number]
    met.middle.change, met.middle.changed = (side, number, field), 0
    error = met.hand_over()
    assert met.middle.changed, "the message never came by"
    if kind in SEALED:
        assert type(error) is ProtocolError
        assert f"{kind.__name__}, was altered on its way" in str(error)  # and its code tells no more
        assert "look for who" in str(error)
    elif field == "magic":
        assert type(error) is ProtocolError
        assert "magic" in str(error)
    elif field in ("versions", "version"):
        assert type(error) is VersionMismatch
        assert "version" in str(error)
        assert "upgrade" in str(error)
    else:  # nobody can tell which of these it was
        assert type(error) is AuthenticationFailed
        assert "give both nodes the same" in str(error)
        assert {"nonce": "a nonce", "macs": "a proof"}[field] in str(error).partition("altered on its way")[2]
    met.middle.change = None
    assert met.hand_over() is None


@pytest.mark.expects_warnings
def test_what_a_dialer_said_before_opens_no_door_again(met: Met) -> None:
    """Byte for byte, all of it, up to the sealed introduction."""
    met.middle.change = None
    accepted = met.source.node.counters().get("connections: accepted", 0)
    assert met.hand_over() is None
    said = b"".join(met.middle.heard)
    before = met.source.node.counters()
    host, _, port = met.middle.goes_to.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as replayed:
        replayed.sendall(said)
        while replayed.recv(1 << 16):
            pass
    refused = "connections: AuthenticationFailed"
    wait_until(
        lambda: met.source.node.counters().get(refused, 0) == before.get(refused, 0) + 1,
        timeout_s=PATIENCE_S,
        what=lambda: f"the replay is counted: {met.source.node.counters()}",
    )
    assert met.source.node.counters()["connections: accepted"] == accepted + 1


@pytest.mark.parametrize("version", [0, 1])
def test_frames_of_the_native_core_are_of_the_negotiated_version(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")  # dialect 0 knows no hosts
    with contextlib.ExitStack() as stack:
        met = stack.enter_context(contextlib.closing(Met()))
        stack.callback(dialect_0.speak([version]))
        assert met.hand_over() is None
        assert met.middle.native_dialects == {("dialer", version), ("acceptor", version)}


@pytest.mark.parametrize("side", ["dialer", "acceptor"])
def test_a_native_frame_of_another_version_ends_the_connection(met: Met, side: str) -> None:
    met.middle.change = None
    hears = met.source.node if side == "dialer" else met.target.node
    before = hears.counters().get("protocol_errors", 0)
    met.middle.change_dialect = side
    try:
        error = met.hand_over()
    finally:
        met.middle.change_dialect = ""
    assert type(error) is (PeerLost if side == "dialer" else ProtocolError)
    if side == "acceptor":
        assert "a control frame of dialect 0, and the handshake chose 1" in str(error)
    assert hears.counters()["protocol_errors"] == before + 1
    assert met.hand_over() is None


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_a_field_that_is_missing_or_cannot_be_is_named(kind: Any) -> None:
    """What a peer that knows the secret, and has a bug, may send."""
    required = {field.name for field in msgspec.structs.fields(kind) if field.required}
    good = {"type": kind.__struct_config__.tag}
    for field in msgspec.structs.fields(kind):
        for value in ({}, None, 1.5):
            body = msgspec.msgpack.encode({**good, **_valid(kind), field.name: value})
            with pytest.raises(ProtocolError, match=rf"\$\.{field.name}"):
                wire.decode(body, kind)
        if field.name in required:
            short = {name: one for name, one in _valid(kind).items() if name != field.name}
            with pytest.raises(ProtocolError, match=f"`{field.name}`"):
                wire.decode(msgspec.msgpack.encode({**good, **short}), kind)


def _valid(kind: Any) -> dict[str, Any]:
    values = {
        **{"magic": wire.MAGIC, "versions": [1], "version": 1, "nonce": bytes(32), "macs": [bytes(32)]},
        **{"epoch": bytes(16), "wanted_epoch": bytes(16), "name": "n", "host_id": b"h", "layout": b"l"},
        **{"ucx_address": b"", "region_addresses": [1], "keys": [b""], "mappable": [True]},
        **{"pool_socket": b"", "pool_token": b"", "code": "Busy", "message": "m"},
        **{"field": "", "source_value": "", "target_value": ""},
    }
    return {name: values[name] for name in kind.__struct_fields__}
