"""Opening a connection to a node, and trying again where it was cut off."""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
from collections.abc import Callable
from typing import TypeVar

from kvlink.errors import DeadlineExceeded, PeerLost, PeerUnreachable
from kvlink.handoff.address import Address, SocketAddress, resolve
from kvlink.handoff.deadline import Deadline

__all__ = ["open_connection", "with_retries"]

# A node that is flooded by strangers cuts off connections at random, and one that had to wait until
# the other sources of a ticket were met may have cut off this one: worth another try.
_RETRY_AFTER_S = 0.02
_MOST_TRIES = 5

_Result = TypeVar("_Result")


def with_retries(attempt: Callable[[], _Result], deadline: Deadline) -> _Result:
    """Return what `attempt` returns, tried again some times if the other side hangs up.

    Raises what the last of them raised.
    """
    tries = 0
    while True:
        tries += 1
        try:
            return attempt()
        except (PeerLost, DeadlineExceeded):
            # A deadline may be the acceptor's, which counts from when it was dialed.
            if tries == _MOST_TRIES or deadline.remaining_s <= 0:
                raise
        threading.Event().wait(min(_RETRY_AFTER_S * 2**tries, deadline.slice_s()))


def open_connection(address: Address, deadline: Deadline) -> socket.socket:
    """Return a connected, non-blocking socket.

    Raises
    ------
    PeerUnreachable
        If there is no way to `address`.
    DeadlineExceeded, Closed
        If time ran out, or it was called off.
    """
    causes = []
    for family, place in resolve(address):
        try:
            return _connect_to(family, place, deadline)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise PeerUnreachable(f"this process is out of descriptors or memory: {error.strerror}") from None
            causes.append(f"{place[0]}: {error.strerror or error}")
    raise PeerUnreachable(f"{'; '.join(causes)}; is the node still running, and is this its address?")


def _connect_to(family: socket.AddressFamily, place: SocketAddress, deadline: Deadline) -> socket.socket:
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        status = connection.connect_ex(place)
        if status == errno.EINPROGRESS:
            poller = select.poll()
            poller.register(connection, select.POLLOUT)
            while not poller.poll(deadline.slice_s() * 1000):
                pass
            status = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        _raise_if_error(status)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        connection.close()
        raise
    return connection


def _raise_if_error(status: int) -> None:
    if status:
        raise OSError(status, os.strerror(status))
