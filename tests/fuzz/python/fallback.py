"""The conversation of ``kvlink.fallback``, with a peer that knows the secret and with one that does not.

Without the secret nothing but the hello is believed; with it a claim is what its checks allow, or an error of kvlink's.
"""

from __future__ import annotations

import hmac
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
import numpy as np

from fuzz.draws import Draws
from fuzz.samples import EPOCH, SECRET, layout, plain_layout
from kvlink.errors import KvlinkError
from kvlink.fallback_wire import Claim, Conversation, Grant, Refusal, digest_of

_MOST_TOKENS = 1 << 16
_TOKENS = {"full": np.array([0, 1, 5]), "state": np.array([0])}
_OWN_CLAIM = Claim.of(layout(), _TOKENS, handoff="7", epoch=EPOCH)
_CLAIM = msgspec.msgpack.decode(msgspec.msgpack.encode(_OWN_CLAIM))
_LAYOUT = plain_layout()
_GRANT = msgspec.msgpack.decode(
    msgspec.msgpack.encode(Grant(nbytes=8, digest=digest_of(np.zeros(8, dtype=np.uint8)), payload=b"first token"))
)
_REFUSAL = msgspec.msgpack.decode(msgspec.msgpack.encode(Refusal(kind="Busy", message="later")))
_NONCE = bytes(16)

_T = TypeVar("_T")


class _Hangup(KvlinkError):
    """The peer has no more to say."""


class _Endpoint:
    """Gives what the peer sends, message after message; who asks for more than there is finds it gone."""

    def __init__(self, stream: bytes) -> None:
        self._rest = stream
        self.sent = bytearray()

    async def send(self, buffer: Any) -> None:
        """Take it."""
        self.sent += bytes(buffer)

    async def recv(self, buffer: Any) -> None:
        """Fill the buffer."""
        size = buffer.nbytes
        if size > len(self._rest):
            raise _Hangup("gone")
        buffer[:] = np.frombuffer(self._rest[:size], dtype=np.uint8)
        self._rest = self._rest[size:]

    async def close(self) -> None:
        """Do nothing."""


def _finished(work: Coroutine[Any, Any, _T]) -> _T:
    """Return what `work` returns; it has nothing to wait for."""
    try:
        work.send(None)
    except StopIteration as end:
        result: _T = end.value
        return result
    raise AssertionError("it waits for something")


def _frame(body: bytes) -> bytes:
    return len(body).to_bytes(8, "little") + body


def _sealed(body: bytes, nonces: bytes, *, number: int) -> bytes:
    return _frame(body + hmac.digest(SECRET, number.to_bytes(4, "little") + nonces + body, "sha256"))


def _spoiled(draws: Draws, usual: dict[str, Any]) -> bytes:
    if draws.byte() >= 224:
        return draws.bytes(draws.byte())
    if "layout" in usual and draws.byte() & 1:
        usual = {**usual, "layout": draws.spoiled(_LAYOUT)}
    return msgspec.msgpack.encode(draws.spoiled(usual))


def _hear_claim(draws: Draws, *, knows_secret: bool) -> None:
    claim = _NONCE + _spoiled(draws, _CLAIM)
    endpoint = _Endpoint(b"")
    talk = Conversation(endpoint, secret=SECRET)
    _finished(talk.say_hello())
    nonce = bytes(endpoint.sent[9:])
    endpoint._rest = _sealed(claim, nonce, number=1) if knows_secret else _frame(claim + draws.bytes(32))
    heard = _finished(talk.hear_claim())
    assert knows_secret, "a claim was believed"
    wanted = heard.wanted(most=_MOST_TOKENS)
    assert list(wanted) == [group.name for group in heard.layout.groups]
    assert all(len(tokens) <= _MOST_TOKENS for tokens in wanted.values())


def _hear_answer(draws: Draws) -> None:
    """Be the target. The own nonce is new each time, so that no code fits: what is refused is what comes before it."""
    hello = _frame(bytes([1]) + _NONCE) if draws.byte() < 224 else _frame(draws.bytes(draws.byte()))
    answer = _spoiled(draws, _GRANT if draws.byte() & 1 else _REFUSAL)
    talk = Conversation(_Endpoint(hello + _frame(answer + draws.bytes(32)) + draws.rest()), secret=SECRET)
    _finished(talk.hear_hello())
    _finished(talk.ask(_OWN_CLAIM))
    raise AssertionError("an answer was believed")


def one(data: bytes) -> None:
    """Let a peer claim or answer."""
    draws = Draws(data)
    who = draws.below(4)
    try:
        if who == 3:
            _hear_answer(draws)
        else:
            _hear_claim(draws, knows_secret=who < 2)
    except KvlinkError:
        return
