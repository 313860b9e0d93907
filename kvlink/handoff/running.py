"""The running parts of a node: started together, closed together, whatever happens in between."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import msgspec

from kvlink.config import Limits
from kvlink.errors import Closed, UnsupportedMemory
from kvlink.handoff.accept import Acceptor
from kvlink.handoff.address import listen_on
from kvlink.handoff.awaiting import Awaiters
from kvlink.handoff.connect import Connector
from kvlink.handoff.dial import Dialer
from kvlink.handoff.handshake import Secrets
from kvlink.handoff.introduction import Introduction
from kvlink.handoff.native import NativeEngine
from kvlink.handoff.pairing import Shares
from kvlink.handoff.pool_socket import PoolSocket
from kvlink.memory import pool_of
from kvlink.transport import open_ucx

if TYPE_CHECKING:
    from kvlink.layout import CacheLayout, KVCache, MemoryRegion
    from kvlink.memory import SharedPool

__all__ = ["NodeSettings", "Running"]

_EPOCH_BYTES = 16

_live: weakref.WeakSet[Running] = weakref.WeakSet()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """What the user chose, checked."""

    name: str
    listen: str
    advertise: str | None
    secrets: Secrets
    lanes: tuple[str, ...]
    copy_threads: int
    limits: Limits


class Running:
    """Owns the native engine, the connecting threads and the sockets of one node.

    Apart from ``Node``, so that no thread keeps a forgotten node alive: when the last reference to
    the node and its handles goes, or the interpreter exits, this is closed.
    """

    def __init__(self, cache: KVCache, settings: NodeSettings) -> None:
        cache = cache.within_allocations(pool_of)
        if any(region.kind != "host" for region in cache.regions):
            raise UnsupportedMemory("node: a cache in GPU memory cannot be handed over by this version")
        self.cache = cache  # keeps the memory alive until `close` has returned
        self.epoch = os.urandom(_EPOCH_BYTES)
        self.closed = False
        self._limits = settings.limits
        self._process = os.getpid()
        # Re-entrant, like every lock on the way of `close`: the garbage collector may close a
        # forgotten node in the middle of anything that any thread does.
        self._closing = threading.RLock()
        with contextlib.ExitStack() as undo:
            self._start(settings, undo)
            undo.pop_all()
        _live.add(self)

    def _start(self, settings: NodeSettings, undo: contextlib.ExitStack) -> None:
        """Acquire everything; `undo` learns what to give back should a later step fail."""
        listener, self.address = listen_on(
            settings.listen, advertise=settings.advertise, has_secret=settings.secrets != (b"",)
        )
        undo.callback(listener.close)
        pools = [_whole_pool(region) for region in self.cache.regions]
        pool_socket = PoolSocket(pools)
        undo.callback(pool_socket.close)
        self.engine = start_engine(self.cache, self.epoch, settings, listen_host=listener.getsockname()[0])
        undo.callback(self.engine.close, deadline_s=0.0)
        introduction = Introduction(
            epoch=self.epoch,
            name=settings.name,
            packed_layout=msgspec.msgpack.encode(self.cache.layout),
            region_addresses=tuple(region.address for region in self.cache.regions),
            mappable=tuple(pool is not None for pool in pools),
            keys=tuple(self.engine.pack_keys()),
            ucx_address=self.engine.ucx_address(),
        )
        self.awaiters = Awaiters(self.engine.wake_fd())
        undo.callback(self.awaiters.close)
        self.dialer = Dialer(
            self.engine,
            name=settings.name,
            connector=Connector(self.engine, introduction, secrets=settings.secrets, lanes=settings.lanes),
            shares=Shares(self.cache.layout, epoch=self.epoch),
            limits=settings.limits,
        )
        self.acceptor = Acceptor(
            self.engine,
            introduction,
            listener=listener,
            pools=pool_socket,
            secrets=settings.secrets,
            limits=settings.limits,
        )

    def check_usable(self, operation: str, *, closed_too: bool = True) -> None:
        """Refuse in a forked child and, where `closed_too`, after ``close``.

        Raises
        ------
        Closed
            The message says which of the two it is.
        """
        if os.getpid() != self._process:
            raise Closed(
                f"{operation}: this process is a fork of the one that made the node, and the node's threads stayed "
                "there: make nodes after the fork, or start processes by spawn"
            )
        if closed_too and self.closed:
            raise Closed(f"{operation}: the node is closed")

    def close(self, deadline_s: float | None = None) -> None:
        """End everything; see ``Node.close``. Idempotent; a second caller waits for the first."""
        if os.getpid() != self._process:
            return  # The parent's node is none of this process's business.
        deadline_s = self._limits.close_deadline_s if deadline_s is None else deadline_s
        until = time.monotonic() + deadline_s
        self.closed = True
        with self._closing:
            self.acceptor.close(deadline_s=deadline_s)
            self.dialer.close(deadline_s=max(0.0, until - time.monotonic()))
            self.engine.close(deadline_s=max(0.0, until - time.monotonic()))
            self.awaiters.close()
            _live.discard(self)

    def abandon(self) -> None:
        """Let go in a forked child, where none of the threads exist.

        The engine's destructor would wait for its thread, so the child never runs it.
        """
        self.closed = True
        self.acceptor.close_sockets()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.engine))


def _whole_pool(region: MemoryRegion) -> SharedPool | None:
    """Return the pool that is exactly this region: peers map a pool as a whole or not at all."""
    pool = pool_of(region.address)
    return pool if pool is not None and (pool.address, pool.nbytes) == (region.address, region.nbytes) else None


def _abandon_all() -> None:
    for running in list(_live):
        running.abandon()


os.register_at_fork(after_in_child=_abandon_all)


def _numbered(layout: CacheLayout) -> list[tuple[str, int, int, int, bool, int]]:
    """Return the groups as the native core takes them; those of one block pool have one number."""
    pools: dict[str, int] = {}
    numbered = []
    for index, group in enumerate(layout.groups):
        pool = pools.setdefault(group.block_pool, index) if group.block_pool is not None else index
        numbered.append((group.name, group.num_blocks, group.block_tokens, group.window or 0, group.slots, pool))
    return numbered


def start_engine(cache: KVCache, epoch: bytes, settings: NodeSettings, *, listen_host: str) -> NativeEngine:
    """Start the native core over the memory of `cache`, which must stay alive until it is closed."""
    from kvlink import _native

    layout = cache.layout
    engine = _native.Engine(
        epoch=epoch,
        groups=_numbered(layout),
        regions=[(region.address, region.nbytes) for region in cache.regions],
        ucx=open_ucx(listen_host=listen_host),
        copy_threads=settings.copy_threads,
        max_handoffs=settings.limits.max_handoffs,
        lease_cap_ms=int(settings.limits.lease_cap_s * 1000),
    )
    return cast("NativeEngine", engine)  # the generated stub says `object` where this says more
