"""How the pools of a node reach another process of its host: descriptors over a unix socket.

The descriptors are read-only, so that a reader can never write. The socket has a random name in
the abstract namespace: no file is left behind by a process that is killed, and nobody finds it who
was not told. Each authenticated dialer gets a token that buys the descriptors once.

The socket also tells a dialer which process it reads from: the kernel vouches for the pid, in the
numbering of the dialer's own pid namespace.
"""

from __future__ import annotations

import array
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from kvlink.errors import KvlinkError, OutOfMemory, PeerLost, ProtocolError
from kvlink.handoff.deadline import Deadline

__all__ = ["PoolSocket", "SharedPool", "fetch_pools"]

_TOKEN_BYTES = 32
_DESCRIPTORS_A_MESSAGE = 128  # the kernel takes 253 at most
_RETRY_S = 0.005
_CREDENTIALS = struct.Struct("3i")

_Result = TypeVar("_Result")


class SharedPool(Protocol):
    """What kvlink.memory knows of one pool."""

    def open_read_only(self) -> int:
        """Return a new descriptor that cannot be mapped writable; the caller closes it."""


class PoolSocket:
    """The serving side. Thread-safe; ``close`` ends it."""

    def __init__(self, pools: Sequence[SharedPool | None] = ()) -> None:
        self._pools = [pool for pool in pools if pool is not None]
        self._tokens: dict[bytes, float] = {}
        self._lock = threading.Lock()
        self.name = b"kvlink-" + os.urandom(16).hex().encode()
        try:
            self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise OutOfMemory(f"no socket to pass pools over: {error.strerror}") from None
        try:
            self.listener.bind(b"\0" + self.name)
            self.listener.listen(128)
            self.listener.setblocking(False)
        except OSError as error:
            self.listener.close()
            raise OutOfMemory(f"no socket to pass pools over: {error.strerror}") from None

    def lend(self, pools: Sequence[SharedPool | None]) -> None:
        """Send these from now on, and only for tokens that are issued from now on."""
        with self._lock:
            self._tokens = {}
            self._pools = [pool for pool in pools if pool is not None]

    def issue_token(self, *, valid_s: float) -> bytes:
        """Return a token that one connection may redeem within `valid_s` seconds."""
        token = os.urandom(_TOKEN_BYTES)
        now = time.monotonic()
        with self._lock:
            self._tokens = {old: until for old, until in self._tokens.items() if until > now}
            self._tokens[token] = now + valid_s
        return token

    def serve(self, connection: socket.socket, deadline: Deadline) -> None:
        """Send the descriptors to whoever shows a token; the caller closes `connection`.

        Raises
        ------
        ProtocolError
            If the token is unknown, used already, or too old.
        PeerLost, DeadlineExceeded, Closed
            If the connection broke, time ran out, or the node was closed.
        """
        connection.setblocking(False)
        _wait(connection, select.POLLIN, deadline)
        token = _attempt(lambda: connection.recv(_TOKEN_BYTES + 1))
        with self._lock:
            until = self._tokens.pop(token, 0.0)
            pools = self._pools
        if until <= time.monotonic():
            raise ProtocolError("pool socket: an unknown or used token")
        for first in range(0, max(1, len(pools)), _DESCRIPTORS_A_MESSAGE):
            batch = pools[first : first + _DESCRIPTORS_A_MESSAGE]
            _wait(connection, select.POLLOUT, deadline)
            _send_descriptors(connection, batch)

    def close(self) -> None:
        """Stop listening, and let the pools go. Safe twice."""
        self.listener.close()
        self._pools = []


def fetch_pools(name: bytes, token: bytes, *, mappable: Sequence[bool], deadline: Deadline) -> tuple[list[int], int]:
    """Return one descriptor for each region (-1 where it is not mappable), and the peer's pid.

    The caller closes the descriptors. All are -1 and the pid is 0 when the socket cannot be
    reached, as from another network namespace: then other lanes serve.

    Raises
    ------
    ProtocolError, PeerLost
        If the peer sent something else than it announced, or hung up.
    DeadlineExceeded, Closed
        If time ran out, or the node was closed.
    """
    unreachable = [-1] * len(mappable), 0
    try:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:
        raise OutOfMemory(f"no socket to fetch pools over: {error.strerror}") from None
    received: list[int] = []
    with connection:
        if not _connect(connection, name, deadline):
            return unreachable
        pid = _peer_pid(connection)
        try:
            _attempt(lambda: connection.send(token, socket.MSG_NOSIGNAL))
            while True:  # one message at least, even for no pool at all: the token must be seen to be redeemed
                _wait(connection, select.POLLIN, deadline)
                received += _receive_descriptors(connection, most=sum(mappable) - len(received))
                if len(received) == sum(mappable):
                    break
        except KvlinkError:
            for descriptor in received:
                os.close(descriptor)
            raise
    rest = iter(received)
    return [next(rest) if shared else -1 for shared in mappable], pid


def _connect(connection: socket.socket, name: bytes, deadline: Deadline) -> bool:
    connection.setblocking(False)
    while True:
        try:
            connection.connect(b"\0" + name)
        except BlockingIOError:  # the listener's backlog is full, and no event tells when it is not
            time.sleep(min(_RETRY_S, deadline.slice_s()))
        except OSError:
            return False
        else:
            return True


def _peer_pid(connection: socket.socket) -> int:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[0])


def _send_descriptors(connection: socket.socket, pools: Sequence[SharedPool]) -> None:
    descriptors: list[int] = []
    try:
        descriptors.extend(pool.open_read_only() for pool in pools)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        _attempt(lambda: connection.sendmsg([bytes([len(descriptors)])], rights, socket.MSG_NOSIGNAL))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _receive_descriptors(connection: socket.socket, *, most: int) -> list[int]:
    room = socket.CMSG_SPACE(_DESCRIPTORS_A_MESSAGE * array.array("i").itemsize)
    data, control, flags, _ = _attempt(lambda: connection.recvmsg(2, room, socket.MSG_CMSG_CLOEXEC))
    descriptors = array.array("i")
    for level, kind, raw in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(raw[: len(raw) - len(raw) % descriptors.itemsize])
    announced = data[0] if len(data) == 1 else 0
    if not data or flags & socket.MSG_CTRUNC or len(descriptors) != announced or not min(1, most) <= announced <= most:
        for descriptor in descriptors:
            os.close(descriptor)
        if not data:
            raise PeerLost("the peer hung up before it had sent its pools")
        raise ProtocolError(f"the peer sent {len(descriptors)} pools where {announced} of at most {most} were due")
    return descriptors.tolist()


def _wait(connection: socket.socket, events: int, deadline: Deadline) -> None:
    poller = select.poll()
    poller.register(connection, events)
    while not poller.poll(deadline.slice_s() * 1000):
        pass


def _attempt(step: Callable[[], _Result]) -> _Result:
    try:
        return step()
    except OSError as error:
        raise PeerLost(f"pool socket: {error.strerror or error}") from None
