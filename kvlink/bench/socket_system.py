"""One TCP connection that is written from scattered blocks and read into scattered blocks: what TCP lanes are up to."""

from __future__ import annotations

import socket
import struct
import time

import kvlink
from kvlink import _native
from kvlink.bench.scattered import Geometry, Pool, Table, run_offsets
from kvlink.bench.source import SEED
from kvlink.bench.systems import DEADLINE_S, Moved, Setting, Tables
from kvlink.testing import Worker

__all__ = ["SocketSource", "SocketSystem"]

_GO = b"go"


class SocketSource:
    """The writing side. Lives in a `kvlink.testing.Worker`."""

    def __init__(self, *, geometry: Geometry) -> None:
        """Fill a private pool and listen on loopback."""
        self._geometry = geometry
        self._pool = Pool(geometry, memory="private")
        self._pool.fill(seed=SEED)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(DEADLINE_S)
        self._link: socket.socket | None = None

    def address(self) -> tuple[str, int]:
        """Return where to connect."""
        host, port = self._listener.getsockname()
        return host, port

    def accept(self) -> None:
        """Take the one connection."""
        self._link, _ = self._listener.accept()
        _bound(self._link)

    def send(self, table: Table) -> float:
        """Wait until the target is ready, write the blocks of `table`, and return the CPU seconds of that."""
        if self._link is None:
            raise kvlink.PeerLost("bench transfer: nobody has connected to the socket yet")
        offsets = run_offsets(self._geometry, table)
        if self._link.recv(len(_GO)) != _GO:
            raise kvlink.PeerLost("bench transfer: the target of the socket is gone")
        cpu_started = time.process_time()
        _native.send_runs(
            socket=self._link.fileno(),
            pool=self._pool.bytes,
            offsets=offsets,
            run_bytes=self._geometry.block_bytes,
        )
        return time.process_time() - cpu_started


class SocketSystem:
    """The reading side here, the writing side in another process."""

    name = "socket"
    op = "readv"
    memory = "private"

    def __init__(self, setting: Setting) -> None:
        """Start the writing process and connect to it."""
        self._geometry = setting.geometry
        self._pool = Pool(setting.geometry, memory="private")
        self._source = Worker("kvlink.bench.socket_system:SocketSource", arguments={"geometry": setting.geometry})
        try:
            address: tuple[str, int] = self._source.call("address")
            self._source.start("accept")
            self._link = socket.create_connection(address, timeout=DEADLINE_S)
            _bound(self._link)
            self._source.result(timeout_s=DEADLINE_S)
        except BaseException:
            self._source.kill()
            raise

    def move(self, tables: Tables) -> Moved:
        """Ask for the blocks of one request and read them, from the question to the last byte."""
        source_table, target_table = tables
        self._pool.forget()
        offsets = run_offsets(self._geometry, target_table)
        self._source.start("send", source_table)
        cpu_started, started = time.process_time(), time.perf_counter()
        self._link.sendall(_GO)
        _native.receive_runs(
            socket=self._link.fileno(), pool=self._pool.bytes, offsets=offsets, run_bytes=self._geometry.block_bytes
        )
        seconds, cpu_target_s = time.perf_counter() - started, time.process_time() - cpu_started
        return Moved(
            seconds=seconds,
            cpu_source_s=self._source.result(timeout_s=DEADLINE_S),
            cpu_target_s=cpu_target_s,
            lane="tcp",
            verified=self._pool.holds(source_table=source_table, target_table=target_table, seed=SEED),
        )

    def reason(self) -> str:
        """Say what it is."""
        return "one connection over loopback, writev from and readv into the blocks"

    def close(self) -> None:
        """Close the connection and end the other process."""
        self._link.close()
        self._source.kill()


def _bound(link: socket.socket) -> None:
    """Let the system bound each call: with a timeout of Python's the socket would no longer block, as readv needs."""
    link.settimeout(None)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        link.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(DEADLINE_S), 0))
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
