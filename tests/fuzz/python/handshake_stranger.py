"""A handshake with somebody who does not know the secret: on either side it never succeeds.

It ends with one of few errors, and the stranger has made this side send no more than two small frames.
"""

from __future__ import annotations

from typing import Any, cast

import msgspec

from fuzz.draws import Draws
from fuzz.samples import SECRET, as_plain
from fuzz.scripted_socket import ScriptedSocket
from kvlink import wire
from kvlink.errors import (
    AuthenticationFailed,
    Busy,
    Closed,
    KvlinkError,
    NotReady,
    PeerLost,
    ProtocolError,
    VersionMismatch,
)
from kvlink.handoff import handshake
from kvlink.handoff.deadline import Deadline
from kvlink.handoff.framed_socket import FramedSocket

_ALLOWED = (AuthenticationFailed, VersionMismatch, ProtocolError, PeerLost, Busy, Closed, NotReady)
_SECRETS = (SECRET, b"before the rotation")

_HELLO = as_plain(wire.Hello(magic=wire.MAGIC, versions=[1], nonce=bytes(32)))
_CHALLENGE = as_plain(wire.Challenge(version=1, nonce=bytes(32)))
_PROOF = as_plain(wire.Proof(macs=[bytes(32), bytes(range(32))]))
_REFUSAL = as_plain(wire.Refuse(code="LayoutMismatch", message="no", field="dtype"))


def _said(draws: Draws, first: dict[str, Any]) -> bytes:
    """Return the stranger's frames: messages that are spoiled, or any bytes."""
    if draws.byte() >= 192:
        return draws.rest()
    stream = b""
    for usual in (first, _PROOF):
        message = _REFUSAL if draws.byte() >= 224 else usual
        stream += wire.frame(msgspec.msgpack.encode(draws.spoiled(message)))
    return stream + draws.rest()


def one(data: bytes) -> None:
    """Let a stranger dial, or be dialed."""
    draws = Draws(data)
    dials = draws.byte() & 1
    socket = ScriptedSocket(_said(draws, _CHALLENGE if dials else _HELLO), piece=16 + draws.byte() * 8)
    link = FramedSocket(cast("Any", socket), Deadline(60.0))
    try:
        if dials:
            handshake.prove(link, _SECRETS)
        else:
            handshake.answer(link, _SECRETS)
    except _ALLOWED as error:
        assert len(socket.sent) < 512
        handshake.refuse(link, cast("KvlinkError", error))
    else:
        raise AssertionError("a stranger has got through")
