"""A handshake with a peer that knows the secret, seals its frames as it should, and says in them what it likes.

On the acceptor's side it introduces itself to read, or to ask; on the dialer's it is the source. Whatever it says,
the connection ends in an error of kvlink's, or the native core gets a template of layouts that have been checked.
"""

from __future__ import annotations

import hashlib
import hmac
import threading
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from fuzz.draws import Draws
from fuzz.samples import EPOCH, SECRET, as_plain, introduction, layout, plain_layout
from fuzz.scripted_socket import Peer, ScriptedSocket
from kvlink import wire
from kvlink.config import Limits
from kvlink.errors import KvlinkError
from kvlink.handoff import handshake
from kvlink.handoff.accept import Acceptor
from kvlink.handoff.answer import Answerer, Question
from kvlink.handoff.connect import Connector, Meeting
from kvlink.handoff.deadline import Deadline
from kvlink.handoff.framed_socket import FramedSocket
from kvlink.handoff.introduction import check_source, check_welcome
from kvlink.handoff.pairing import Shares, unpack_layout

_ME = introduction()
_KEYRING = handshake.Keyring((SECRET,))
_PACKED = msgspec.msgpack.encode(layout())
_LAYOUT = plain_layout()
_TARGET = as_plain(_ME.as_target(wanted_epoch=EPOCH, share=_PACKED))
_SOURCE = as_plain(_ME.as_source())
_ASKER = as_plain(wire.IntroduceAsker(epoch=EPOCH, name="decode-1", address="decode-1:7001"))
_ASK = as_plain(wire.Ask(number=0, kind="echo", remaining_ms=1000, body=b"what"))
_WELCOME = as_plain(
    wire.Welcome(
        ucx_address=b"address",
        region_addresses=[4096, 8192],
        keys=[b"key", b"key"],
        mappable=[True, False],
        pool_socket=b"",
        pool_token=b"",
    )
)


def _derive(purpose: str, hello: bytes, challenge: bytes) -> bytes:
    transcript = hashlib.sha256(wire.frame(hello) + wire.frame(challenge)).digest()
    return hmac.digest(SECRET, f"kvlink {purpose}\0".encode() + transcript, "sha256")


def _sealed(bodies: list[bytes], key: bytes) -> bytes:
    numbered = enumerate(bodies)
    codes = [hmac.digest(key, number.to_bytes(8, "little") + body, "sha256") for number, body in numbered]
    return b"".join(wire.frame(body + code) for body, code in zip(bodies, codes, strict=True))


def _as_dialer(said: list[bytes]) -> Peer:
    hello = wire.encode(wire.Hello(magic=wire.MAGIC, versions=[1], nonce=bytes(32)))
    challenge = yield wire.frame(hello)
    proof = wire.encode(wire.Proof(macs=[_derive("dialer proof", hello, challenge)]))
    yield wire.frame(proof)
    yield _sealed(said, _derive("dialer seal", hello, challenge))


def _as_acceptor(said: list[bytes]) -> Peer:
    hello = yield b""
    challenge = wire.encode(wire.Challenge(version=1, nonce=bytes(32)))
    yield wire.frame(challenge)
    proof = wire.encode(wire.Proof(macs=[_derive("acceptor proof", hello, challenge)]))
    yield wire.frame(proof) + _sealed(said, _derive("acceptor seal", hello, challenge))


def _spoiled(message: dict[str, Any], draws: Draws) -> bytes:
    if draws.byte() >= 240:
        return draws.bytes(draws.byte())
    if "layout" in message and draws.byte() & 1:
        changed = msgspec.msgpack.encode(draws.spoiled(_LAYOUT))
        return msgspec.msgpack.encode({**message, "layout": changed})
    return msgspec.msgpack.encode(draws.spoiled(message))


class _Engine:
    """Takes connections, as the native engine does, and knows what it was given."""

    def __init__(self) -> None:
        self.attached: list[dict[str, Any]] = []

    def attach_claimant(self, **given: Any) -> int:
        """Note what the native core would be given."""
        self.attached.append(given)
        return 16


def _answer_echo(question: Question) -> bytes:
    return question.body


def _accept(draws: Draws) -> None:
    reads = draws.byte() & 1
    said = [_spoiled(_TARGET if reads else _ASKER, draws)]
    if not reads:
        said += [_spoiled({**_ASK, "number": number}, draws) for number in range(draws.below(3))]
    engine = _Engine()
    answerer = Answerer(name="me", limits=Limits())
    answerer.register("echo", _answer_echo)
    acceptor = cast("Any", Acceptor.__new__(Acceptor))
    acceptor._keyring = _KEYRING
    acceptor._lock = threading.RLock()
    acceptor._pending = {}
    acceptor._answerer = answerer
    acceptor._pools = SimpleNamespace(name=b"kvlink-pools", issue_token=lambda valid_s: bytes(32))
    claimants = SimpleNamespace(note=lambda epoch, digest, peer: None)
    acceptor._served = SimpleNamespace(introduction=_ME, engine=engine, claimants=claimants)
    deadline = Deadline(60.0)
    socket = ScriptedSocket(peer=_as_dialer(said))
    link = FramedSocket(cast("Any", socket), deadline)
    pending = SimpleNamespace(link=link, address="10.0.0.9:1", deadline=deadline, proven=False)
    try:
        acceptor._welcome(pending)
    except KvlinkError as error:
        handshake.refuse(link, error)
        assert not engine.attached
    assert pending.proven
    for given in engine.attached:
        assert given["template"].op_count >= 0
        assert len(given["epoch"]) == 16
        assert given["same_host"] in (True, False)


def _dial(draws: Draws) -> None:
    said = [_spoiled(_SOURCE, draws), _spoiled(_WELCOME, draws)]
    link = FramedSocket(cast("Any", ScriptedSocket(peer=_as_acceptor(said))), Deadline(60.0))
    try:
        handshake.prove(link, _KEYRING.secrets)
        source = handshake.receive(link, wire.IntroduceSource)
        check_source(source, wanted_epoch=EPOCH)
        regions = unpack_layout(source.layout).region_bytes
        share = Shares(layout(), epoch=EPOCH).elect((source.epoch,), [source.layout])[0]
        connector = Connector(cast("Any", None), _ME, keyring=_KEYRING, lanes=("mapped",))
        welcome = connector._agree(Meeting(link=link, source=source), share, wanted_epoch=EPOCH)
        check_welcome(welcome, regions=len(regions))
        assert len(welcome.region_addresses) == len(welcome.mappable) == len(regions)
    except KvlinkError as error:
        handshake.refuse(link, error)


def one(data: bytes) -> None:
    """Let a peer that knows the secret dial, or be dialed."""
    draws = Draws(data)
    if draws.byte() & 1:
        _dial(draws)
    else:
        _accept(draws)
