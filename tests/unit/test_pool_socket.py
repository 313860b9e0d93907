"""Pools are passed to whoever holds a token, once, and no descriptor is lost on the way."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvlink.errors import Closed, DeadlineExceeded, KvlinkError, PeerLost, ProtocolError
from kvlink.handoff.deadline import Deadline
from kvlink.handoff.pool_socket import PoolSocket, fetch_pools


class Pool:
    def __init__(self, content: bytes) -> None:
        self._fd = os.memfd_create("test")
        os.write(self._fd, content)

    def open_read_only(self) -> int:
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY)

    def close(self) -> None:
        os.close(self._fd)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def serve() -> Iterator[Callable[..., Any]]:
    """Answer one connection to a pool socket on another thread; calling the result joins it."""
    made: list[PoolSocket] = []

    def start(pools: PoolSocket, seconds: float = 5.0) -> Callable[[], KvlinkError | None]:
        made.append(pools)
        errors: list[KvlinkError | None] = []

        def run() -> None:
            pools.listener.settimeout(5)
            connection, _ = pools.listener.accept()
            with connection:
                try:
                    pools.serve(connection, Deadline(seconds))
                    errors.append(None)
                except KvlinkError as error:
                    errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()

        def join() -> KvlinkError | None:
            thread.join(timeout=10)
            return errors[0]

        return join

    yield start
    for pools in made:
        pools.close()


@pytest.mark.parametrize("count", [0, 1, 5, 300])
def test_each_region_gets_its_own_pool_and_nothing_is_left_open(serve: Any, count: int) -> None:
    pools = [Pool(f"pool {number}".encode()) if number % 2 == 0 else None for number in range(count)]
    before = descriptors()
    pool_socket = PoolSocket(pools)
    join = serve(pool_socket)
    mappable = [pool is not None for pool in pools]
    fetched, pid = fetch_pools(
        pool_socket.name, pool_socket.issue_token(valid_s=5), mappable=mappable, deadline=Deadline(5)
    )
    assert join() is None
    assert pid == os.getpid()
    for number, fd in enumerate(fetched):
        assert (fd >= 0) == mappable[number]
        if fd >= 0:
            assert os.pread(fd, 100, 0) == f"pool {number}".encode()
            assert os.get_inheritable(fd) is False
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.write(fd, b"x")
            os.close(fd)
    pool_socket.close()
    assert descriptors() == before
    for pool in pools:
        if pool is not None:
            pool.close()


def test_a_token_works_once_and_not_for_ever_and_none_can_be_guessed(serve: Any) -> None:
    pool_socket = PoolSocket([None])
    token, late = pool_socket.issue_token(valid_s=5), pool_socket.issue_token(valid_s=0.0)
    join = serve(pool_socket)
    fetch_pools(pool_socket.name, token, mappable=[False], deadline=Deadline(5))
    assert join() is None
    for bad in (token, late, bytes(32), b"", b"x" * 100):
        join = serve(pool_socket)
        if bad:
            with pytest.raises(PeerLost):
                fetch_pools(pool_socket.name, bad, mappable=[True], deadline=Deadline(5))
        else:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
                silent.connect(b"\0" + pool_socket.name)
        assert isinstance(join(), ProtocolError)


def test_a_socket_out_of_reach_means_no_pools_and_no_pid() -> None:
    assert fetch_pools(b"kvlink-nobody", bytes(32), mappable=[True, False], deadline=Deadline(5)) == ([-1, -1], 0)


def test_a_dialer_that_says_nothing_is_cut_off(serve: Any) -> None:
    pool_socket = PoolSocket([None])
    join = serve(pool_socket, 0.2)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect(b"\0" + pool_socket.name)
        assert isinstance(join(), DeadlineExceeded)


@pytest.mark.parametrize(
    ("announced", "sent", "error"),
    [(1, 2, ProtocolError), (2, 1, ProtocolError), (3, 3, ProtocolError), (0, 0, ProtocolError), (None, 0, PeerLost)],
)
def test_a_peer_that_sends_other_than_it_says_loses_its_descriptors(
    announced: int | None, sent: int, error: type[KvlinkError]
) -> None:
    """Hostile descriptors are closed, whatever else is wrong."""
    name = b"kvlink-test-" + os.urandom(8).hex().encode()
    before = descriptors()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(b"\0" + name)
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(100)
                if announced is not None:
                    rights = array.array("i", [0] * sent)
                    control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if sent else []
                    connection.sendmsg([bytes([announced])], control)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(error):
            fetch_pools(name, bytes(32), mappable=[True, True], deadline=Deadline(2))
        thread.join(timeout=5)
    assert descriptors() == before


def test_closing_the_node_ends_a_fetch() -> None:
    name = b"kvlink-test-" + os.urandom(8).hex().encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(b"\0" + name)
        listener.listen()
        deadline = Deadline(30)
        threading.Timer(0.1, deadline.call_off).start()
        with pytest.raises(Closed):
            fetch_pools(name, bytes(32), mappable=[True], deadline=deadline)
