"""Frames of the control socket, on their way through somebody who alters, drops, doubles and reorders bytes.

What comes out of a sealed connection is a beginning of what went in, frame by frame, however it was cut; of an open one
every frame is inside its limit.
"""

from __future__ import annotations

from typing import Any, cast

from fuzz.draws import Draws
from fuzz.scripted_socket import ScriptedSocket
from kvlink import wire
from kvlink.errors import PeerLost, ProtocolError
from kvlink.handoff.deadline import Deadline
from kvlink.handoff.framed_socket import FramedSocket

_KEYS = (b"k" * 32, b"q" * 32)


def _link(socket: ScriptedSocket, *, is_sealed: bool, is_sender: bool) -> FramedSocket:
    link = FramedSocket(cast("Any", socket), Deadline(60.0))
    if is_sealed:
        own, other = _KEYS if is_sender else reversed(_KEYS)
        link.seal(send_key=own, receive_key=other)
    return link


def _altered(stream: bytes, draws: Draws) -> bytes:
    for _ in range(draws.below(4)):
        at = (draws.byte() << 8 | draws.byte()) % (len(stream) + 1)
        length = draws.byte()
        what = draws.below(5)
        if what == 0:
            stream = stream[:at] + stream[at + length :]
        elif what == 1:
            stream = stream[:at] + stream[at : at + length] + stream[at:]
        elif what == 2:
            stream = stream[:at] + draws.bytes(length) + stream[at:]
        elif what == 3 and at < len(stream):
            stream = stream[:at] + bytes([stream[at] ^ (length or 1)]) + stream[at + 1 :]
        elif what == 4:
            stream = stream[at:] + stream[:at]
    return stream


def one(data: bytes) -> None:
    """Send some frames, alter them, and receive."""
    draws = Draws(data)
    shape = draws.byte()
    is_sealed = bool(shape & 1)
    writer = ScriptedSocket()
    sender = _link(writer, is_sealed=is_sealed, is_sender=True)
    bodies = [draws.bytes(draws.byte()) or b"x" for _ in range(draws.below(4))]
    for body in bodies:
        sender.send(body)
    whole = bytes(writer.sent)
    stream = _altered(whole, draws)
    receiver = _link(ScriptedSocket(stream, piece=1 + (shape >> 1)), is_sealed=is_sealed, is_sender=False)
    received = []
    try:
        while True:
            received.append(receiver.receive())
    except (PeerLost, ProtocolError):
        pass
    if is_sealed:
        assert received == bodies[: len(received)]
    if stream == whole:
        assert received == bodies
    assert all(0 < len(body) <= wire.OPEN_FRAME_BYTES for body in received)
