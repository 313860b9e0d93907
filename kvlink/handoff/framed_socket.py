"""One connection during the handshake: whole frames in and out, each under one deadline."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import select
import socket
import threading

from kvlink import wire
from kvlink.errors import PeerLost, ProtocolError
from kvlink.handoff.deadline import Deadline

__all__ = ["FramedSocket"]

_MAC_BYTES = hashlib.sha256().digest_size


class FramedSocket:
    """Owns a connected socket until ``detach`` or ``close``. For one thread, except ``abort``.

    The deadline covers all frames together, so that a peer which sends a byte now and then gains
    nothing. Reads never go past the frame that was asked for: what follows is the native core's.
    """

    def __init__(self, connection: socket.socket, deadline: Deadline) -> None:
        self._socket = connection
        self._socket.setblocking(False)
        self._ending = threading.Lock()  # so that abort cannot hit a descriptor that has a new owner
        self._deadline = deadline
        self._limit = wire.OPEN_FRAME_BYTES
        self._keys: tuple[bytes, bytes] | None = None  # to seal what is sent, to check what is received
        self._sent = 0
        self._received = 0
        self._aborted = False
        self.dialect = wire.COMMON

    def speak(self, dialect: wire.Dialect) -> None:
        """Write and read messages as both sides have agreed."""
        self.dialect = dialect

    def seal(self, *, send_key: bytes, receive_key: bytes) -> None:
        """Put a code under every frame from here on, and allow larger ones.

        The code covers the frame's number, so a frame can be neither altered, dropped, repeated
        nor sent back to where it came from.
        """
        self._keys = (send_key, receive_key)
        self._sent = self._received = 0  # both sides number from here
        self._limit = wire.SEALED_FRAME_BYTES + _MAC_BYTES

    def allow(self, deadline: Deadline) -> None:
        """Let what follows take until `deadline`."""
        self._deadline = deadline

    def wait_readable(self, *, timeout_s: float) -> bool:
        """Wait for the next frame, or the end of the connection; return whether either has come.

        ``abort`` ends it. Waits in one piece, for connections that are idle most of the time.
        """
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(timeout_s * 1000))

    def send(self, body: bytes) -> None:
        """Send one frame.

        Raises
        ------
        PeerLost
            If the connection broke.
        DeadlineExceeded, Closed
            If time ran out, or the node was closed.
        ProtocolError
            If `body` is larger than the peer would accept.
        """
        if self._keys is not None:
            body += _code(self._keys[0], self._sent, body)
        if len(body) > self._limit:
            raise ProtocolError(f"a message of {len(body)} bytes is more than the {self._limit} that a peer accepts")
        self._sent += 1
        rest = memoryview(wire.frame(body))
        while rest:
            self._wait(select.POLLOUT)
            try:
                rest = rest[self._socket.send(rest, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise PeerLost(f"the connection broke: {error.strerror or error}") from None

    def receive(self) -> bytes:
        """Return the body of the next frame.

        Raises
        ------
        PeerLost
            If the connection broke or ended.
        DeadlineExceeded, Closed
            If time ran out, or the node was closed.
        ProtocolError
            If the frame is too large, or its code does not fit.
        """
        length = wire.frame_bytes(self._receive_exactly(4), limit=self._limit)
        body = self._receive_exactly(length)
        if self._keys is None:
            return body
        body, code = body[:-_MAC_BYTES], body[-_MAC_BYTES:]
        if not hmac.compare_digest(code, _code(self._keys[1], self._received, body)):
            raise ProtocolError("a frame was altered on its way: its code does not fit")
        self._received += 1
        return body

    def try_send_last(self, body: bytes) -> None:
        """Send one frame and end the connection, if that can be done without waiting."""
        if self._keys is not None:
            body += _code(self._keys[0], self._sent, body)
        try:
            self._socket.send(wire.frame(body), socket.MSG_NOSIGNAL)
            # What the peer has sent meanwhile must be read: closing over unread bytes resets the
            # connection, and the reset would overtake the frame.
            self._socket.shutdown(socket.SHUT_WR)
            self._socket.recv(wire.SEALED_FRAME_BYTES)
        except OSError:
            return  # The peer is gone or does not read: it will learn nothing more from us.

    @property
    def connection(self) -> socket.socket:
        """The socket itself, still owned by this object."""
        return self._socket

    def detach(self) -> int:
        """Give up the descriptor to the caller, who closes it from here on.

        Raises
        ------
        PeerLost
            If it was aborted or closed before.
        """
        with self._ending:
            if self._aborted or self._socket.fileno() < 0:
                raise PeerLost("the connection was closed on this side")
            return self._socket.detach()

    def abort(self) -> None:
        """Make the thread that uses this socket fail with ``PeerLost`` soon. Any thread may call it."""
        with self._ending:
            self._aborted = True
            with contextlib.suppress(OSError):  # not connected, closed or detached: nobody waits on it
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection, unless it was detached."""
        with self._ending:
            self._socket.close()

    def _receive_exactly(self, length: int) -> bytes:
        body = bytearray()
        while len(body) < length:
            self._wait(select.POLLIN)
            try:
                piece = self._socket.recv(length - len(body))
            except BlockingIOError:
                continue
            except OSError as error:
                raise PeerLost(f"the connection broke: {error.strerror or error}") from None
            if not piece:
                raise PeerLost("the peer hung up")
            body += piece
        return bytes(body)

    def _wait(self, events: int) -> None:
        poller = select.poll()
        poller.register(self._socket, events)
        while not poller.poll(self._deadline.slice_s() * 1000):
            pass
        self._deadline.slice_s()  # a peer that always has one more byte must run out of time too


def _code(key: bytes, number: int, body: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "little") + body, "sha256")
