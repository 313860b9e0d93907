"""A socket without a network: what its peer says is known beforehand, or made of what it was told."""

from __future__ import annotations

import os
import struct
from collections.abc import Generator
from typing import Any

# Always readable and writable, so that whoever polls it never waits.
_READY = os.open("/dev/null", os.O_RDWR)

Peer = Generator[bytes, bytes, None]
"""Yields what it sends; is sent each frame that it is told, without the length."""


class ScriptedSocket:
    """Stands for the socket of a ``FramedSocket``.

    Parameters
    ----------
    incoming
        What there is to read from the beginning; then the peer has hung up.
    piece
        The most that one read gives.
    peer
        Says something once it was told something.
    """

    def __init__(self, incoming: bytes = b"", *, piece: int = 1 << 20, peer: Peer | None = None) -> None:
        self.sent = bytearray()
        self._incoming = bytearray(incoming)
        self._piece = piece
        self._peer = peer
        self._told = 0
        if peer is not None:
            self._incoming += next(peer, b"")

    def setblocking(self, flag: bool) -> None:
        """Do nothing."""

    def fileno(self) -> int:
        """Return a descriptor that is always ready."""
        return _READY

    def send(self, data: Any, flags: int = 0) -> int:
        """Take everything, and let the peer answer each whole frame."""
        self.sent += data
        while self._peer is not None and len(self.sent) - self._told >= 4:
            length = struct.unpack_from("<I", self.sent, self._told)[0]
            end = self._told + 4 + length
            if len(self.sent) < end:
                break
            body = bytes(self.sent[self._told + 4 : end])
            self._told = end
            try:
                self._incoming += self._peer.send(body)
            except StopIteration:
                self._peer = None
        return len(data)

    def recv(self, most: int, flags: int = 0) -> bytes:
        """Return some of what there is to read."""
        taken = bytes(self._incoming[: min(most, self._piece)])
        del self._incoming[: len(taken)]
        return taken

    def shutdown(self, how: int) -> None:
        """Do nothing."""

    def detach(self) -> int:
        """Return no descriptor that anybody could close."""
        return -1

    def close(self) -> None:
        """Do nothing."""
