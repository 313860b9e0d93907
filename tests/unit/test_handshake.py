"""Two nodes authenticate, and whoever does not know the secret learns and gains nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvlink import wire
from kvlink.errors import (
    AuthenticationFailed,
    Busy,
    Closed,
    ConfigError,
    DeadlineExceeded,
    KvlinkError,
    LayoutMismatch,
    PeerLost,
    ProtocolError,
    StalePeer,
    VersionMismatch,
)
from kvlink.handoff import handshake
from kvlink.handoff.deadline import Deadline
from kvlink.handoff.framed_socket import FramedSocket

SECRETS = (b"swordfish",)


class Side:
    """One end of a connection, driven on a thread of its own."""

    def __init__(self, work: Callable[[FramedSocket], Any], link: FramedSocket) -> None:
        self.link = link
        self.result: Any = None
        self.error: KvlinkError | None = None
        self._thread = threading.Thread(target=self._run, args=(work,))
        self._thread.start()

    def _run(self, work: Callable[[FramedSocket], Any]) -> None:
        try:
            self.result = work(self.link)
        except KvlinkError as error:
            self.error = error
            handshake.refuse(self.link, error)
            self.link.close()

    def join(self) -> Side:
        self._thread.join(timeout=10)
        assert not self._thread.is_alive()
        return self


@pytest.fixture
def connect() -> Any:
    links: list[FramedSocket] = []

    def make(seconds: float = 5.0) -> tuple[FramedSocket, FramedSocket]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            dialer = socket.create_connection(listener.getsockname(), timeout=5)
            accepted, _ = listener.accept()
        pair = FramedSocket(dialer, Deadline(seconds)), FramedSocket(accepted, Deadline(seconds))
        links.extend(pair)
        return pair

    yield make
    for link in links:
        link.close()


def meet(connect: Any, dialer: handshake.Secrets, acceptor: handshake.Secrets) -> tuple[Side, Side]:
    left, right = connect()
    sides = (
        Side(lambda link: handshake.prove(link, dialer), left),
        Side(lambda link: handshake.answer(link, acceptor), right),
    )
    return sides[0].join(), sides[1].join()


@pytest.mark.parametrize(
    ("dialer", "acceptor"),
    [(SECRETS, SECRETS), ((b"",), (b"",)), ((b"old", b"new"), (b"new", b"old")), ((b"old", b"new"), (b"new",))],
    ids=["one", "none", "rotating", "rotated"],
)
def test_who_shares_a_secret_may_talk(connect: Any, dialer: Any, acceptor: Any) -> None:
    left, right = meet(connect, dialer, acceptor)
    assert left.error is None
    assert right.error is None
    left.link.send(b"ping" * 5000)  # larger than what an open frame may be
    assert right.link.receive() == b"ping" * 5000
    right.link.send(b"pong")
    assert left.link.receive() == b"pong"


@pytest.mark.parametrize(
    ("dialer", "acceptor"), [((b"wrong",), SECRETS), ((b"",), SECRETS), (SECRETS, (b"",)), ((b"a", b"b"), (b"c",))]
)
def test_who_does_not_is_refused_and_both_know_why(connect: Any, dialer: Any, acceptor: Any) -> None:
    for side in meet(connect, dialer, acceptor):
        assert isinstance(side.error, AuthenticationFailed)
        assert "secret" in str(side.error)


def test_an_acceptor_without_the_secret_is_found_out(connect: Any) -> None:
    """It answers a proof that it cannot check with one that it cannot make."""
    left, right = connect()
    dialer = Side(lambda link: handshake.prove(link, SECRETS), left)
    right.receive()
    right.send(wire.encode(wire.Challenge(version=1, nonce=bytes(32))))
    right.receive()
    right.send(wire.encode(wire.Proof(macs=[bytes(32), bytes(32)])))
    assert isinstance(dialer.join().error, AuthenticationFailed)


def test_a_proof_sent_back_to_its_maker_proves_nothing(connect: Any) -> None:
    left, right = connect()
    dialer = Side(lambda link: handshake.prove(link, SECRETS), left)
    right.receive()
    right.send(wire.encode(wire.Challenge(version=1, nonce=bytes(32))))
    right.send(right.receive())
    assert isinstance(dialer.join().error, AuthenticationFailed)


def test_a_handshake_played_again_proves_nothing(connect: Any) -> None:
    """The dialer's side of an earlier connection, byte for byte."""
    left, right = connect()
    spoken: list[bytes] = []
    send = left.send
    left.send = lambda body: (spoken.append(body), send(body))  # type: ignore[method-assign]
    acceptor = Side(lambda link: handshake.answer(link, SECRETS), right)
    handshake.prove(left, SECRETS)
    assert acceptor.join().error is None

    left, right = connect()
    acceptor = Side(lambda link: handshake.answer(link, SECRETS), right)
    for body in spoken:
        left.send(body)
    assert isinstance(acceptor.join().error, AuthenticationFailed)


def test_two_acceptors_cannot_be_played_against_each_other(connect: Any) -> None:
    """The middle man passes one node's challenge on to another, and its proof back, with the roles swapped."""
    attacker, victim = connect()
    acceptor = Side(lambda link: handshake.answer(link, SECRETS), victim)
    nonce = bytes(32)
    attacker.send(wire.encode(wire.Hello(magic=wire.MAGIC, versions=[1], nonce=nonce)))
    challenge = wire.decode(attacker.receive(), wire.Challenge)
    assert isinstance(challenge, wire.Challenge)

    other_attacker, other_victim = connect()
    other = Side(lambda link: handshake.answer(link, SECRETS), other_victim)
    other_attacker.send(wire.encode(wire.Hello(magic=wire.MAGIC, versions=[1], nonce=challenge.nonce)))
    other_attacker.receive()
    other_attacker.send(wire.encode(wire.Proof(macs=[bytes(32)])))
    reply = other_attacker.receive()  # a refusal: an acceptor proves nothing before the dialer has
    assert isinstance(wire.decode(reply, wire.Proof), wire.Refuse)
    attacker.send(reply)
    assert acceptor.join().error is not None
    assert other.join().error is not None


@pytest.mark.parametrize("message", ["hello", "challenge"])
def test_a_changed_byte_before_the_proofs_is_noticed(connect: Any, message: str) -> None:
    """A man in the middle rewrites the versions or a nonce."""
    left, man_left = connect()
    man_right, right = connect()
    dialer = Side(lambda link: handshake.prove(link, SECRETS), left)
    acceptor = Side(lambda link: handshake.answer(link, SECRETS), right)
    hello = man_left.receive()
    man_right.send(_with_another_nonce(hello, wire.Hello) if message == "hello" else hello)
    challenge = man_right.receive()
    man_left.send(_with_another_nonce(challenge, wire.Challenge) if message == "challenge" else challenge)
    man_right.send(man_left.receive())
    man_left.send(man_right.receive())
    assert isinstance(acceptor.join().error, AuthenticationFailed)
    assert isinstance(dialer.join().error, AuthenticationFailed)


def _with_another_nonce(body: bytes, kind: Any) -> bytes:
    import msgspec

    return wire.encode(msgspec.structs.replace(wire.decode(body, kind), nonce=b"\1" * 32))


def test_a_sealed_frame_can_be_neither_altered_nor_repeated_nor_sent_back(connect: Any) -> None:
    def sealed() -> tuple[FramedSocket, FramedSocket, socket.socket]:
        left, right = connect()
        left.seal(send_key=b"l", receive_key=b"r")
        right.seal(send_key=b"r", receive_key=b"l")
        return left, right, left.connection

    left, right, raw = sealed()
    sent: list[bytes] = []
    body = b"a frame"
    framed = wire.frame(body + _code(b"l", 0, body))
    raw.send(framed)
    assert right.receive() == body
    raw.send(framed)
    with pytest.raises(ProtocolError, match="altered"):
        right.receive()

    left, right, raw = sealed()
    raw.send(framed[:5] + b"A" + framed[6:])
    with pytest.raises(ProtocolError, match="altered"):
        right.receive()

    left, right, raw = sealed()
    raw.send(wire.frame(body + _code(b"r", 0, body)))
    with pytest.raises(ProtocolError, match="altered"):
        right.receive()

    left, right, raw = sealed()
    raw.send(wire.frame(b"short"))
    with pytest.raises(ProtocolError, match="altered"):
        right.receive()
    assert sent == []


def _code(key: bytes, number: int, body: bytes) -> bytes:
    import hmac

    return hmac.digest(key, number.to_bytes(8, "little") + body, "sha256")


@pytest.mark.parametrize("versions", [[2], [7, 9]])
def test_a_dialer_of_other_versions_is_told_which(connect: Any, versions: list[int]) -> None:
    left, right = connect()
    acceptor = Side(lambda link: handshake.answer(link, SECRETS), right)
    left.send(wire.encode(wire.Hello(magic=wire.MAGIC, versions=versions, nonce=bytes(32))))
    refusal = wire.decode(left.receive(), wire.Challenge)
    assert isinstance(refusal, wire.Refuse)
    assert refusal.code == "VersionMismatch"
    assert isinstance(acceptor.join().error, VersionMismatch)


def test_an_acceptor_that_chooses_what_was_not_offered_is_refused(connect: Any) -> None:
    left, right = connect()
    dialer = Side(lambda link: handshake.prove(link, SECRETS), left)
    right.receive()
    right.send(wire.encode(wire.Challenge(version=9, nonce=bytes(32))))
    assert isinstance(dialer.join().error, VersionMismatch)


def test_another_protocol_is_told_by_its_first_bytes(connect: Any) -> None:
    left, right = connect()
    acceptor = Side(lambda link: handshake.answer(link, SECRETS), right)
    left.connection.send(b"GET / HTTP/1.1\r\n\r\n")
    error = acceptor.join().error
    assert isinstance(error, ProtocolError)
    assert "is the other side a kvlink node" in str(error)


def test_a_dialer_that_drips_is_cut_off_at_the_deadline(connect: Any) -> None:
    """A byte now and then does not move the deadline."""
    left, right = connect(0.3)
    acceptor = Side(lambda link: handshake.answer(link, SECRETS), right)
    frame = wire.frame(wire.encode(wire.Hello(magic=wire.MAGIC, versions=[1], nonce=bytes(32))))
    pause = threading.Event()
    for position in range(len(frame)):
        try:
            left.connection.send(frame[position : position + 1])
        except OSError:
            break
        if pause.wait(0.02) or acceptor.error is not None:
            break
    assert isinstance(acceptor.join().error, DeadlineExceeded)


def test_a_peer_that_reads_nothing_cannot_hold_up_a_sender(connect: Any) -> None:
    left, _ = connect(0.3)
    left.seal(send_key=b"l", receive_key=b"r")
    sender = Side(lambda link: [link.send(bytes(1 << 20)) for _ in range(64)], left)
    assert isinstance(sender.join().error, DeadlineExceeded)


def test_hanging_up_is_noticed_at_once_and_so_is_closing_the_node(connect: Any) -> None:
    left, right = connect()
    acceptor = Side(lambda link: handshake.answer(link, SECRETS), right)
    left.close()
    assert isinstance(acceptor.join().error, PeerLost)

    left, right = connect()
    acceptor = Side(lambda link: handshake.answer(link, SECRETS), right)
    right.abort()
    assert isinstance(acceptor.join().error, PeerLost)
    with pytest.raises(PeerLost):
        right.detach()

    deadline = Deadline(5)
    deadline.call_off()
    with pytest.raises(Closed):
        deadline.slice_s()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("Busy", Busy),
        ("AuthenticationFailed", AuthenticationFailed),
        ("StalePeer", ProtocolError),
        ("Ex", ProtocolError),
    ],
)
def test_a_stranger_can_make_this_side_raise_few_errors(connect: Any, code: str, expected: type[KvlinkError]) -> None:
    left, right = connect()
    dialer = Side(lambda link: handshake.prove(link, SECRETS), left)
    right.receive()
    right.send(wire.encode(wire.Refuse(code=code, message="because")))
    error = dialer.join().error
    assert type(error) is expected
    assert "the peer refused: because" in str(error)


def test_an_authenticated_peer_says_why_it_refuses(connect: Any) -> None:
    for error in (
        LayoutMismatch("head_dim differs", field="head_dim", source_value="64", target_value="128"),
        StalePeer("restarted"),
    ):
        left, right = meet(connect, SECRETS, SECRETS)
        handshake.refuse(right.link, error)
        with pytest.raises(type(error)) as caught:
            handshake.receive(left.link, wire.IntroduceSource)
        assert str(error) in str(caught.value)
        assert getattr(caught.value, "field", "") == getattr(error, "field", "")
        assert getattr(caught.value, "target_value", "") == getattr(error, "target_value", "")


@pytest.mark.parametrize("secret", ["", b"", [], [b"a", b"b", b"c"], [b"a", b""], 7, [None]])
def test_a_secret_that_is_none_is_refused(secret: Any) -> None:
    with pytest.raises(ConfigError):
        handshake.secrets_of(secret)


def test_text_and_bytes_are_the_same_secret() -> None:
    assert handshake.secrets_of("swordfish") == handshake.secrets_of(b"swordfish") == SECRETS
    assert handshake.secrets_of(None) == (b"",)
