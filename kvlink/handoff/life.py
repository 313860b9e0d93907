"""What belongs to one life of a node, from its epoch to the memory that it registered."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from kvlink import wire
from kvlink.config import Limits
from kvlink.errors import KvlinkError, NotReady, OutOfMemory
from kvlink.handoff.ask import Asker
from kvlink.handoff.block_tables import Group
from kvlink.handoff.call import Caller
from kvlink.handoff.claimants import Claimants
from kvlink.handoff.connect import Connector
from kvlink.handoff.descriptor import DESCRIPTOR_VERSION, GroupFacts, NodeDescriptor
from kvlink.handoff.dial import Dialer
from kvlink.handoff.handshake import Keyring
from kvlink.handoff.introduction import Introduction
from kvlink.handoff.native import NativeEngine
from kvlink.handoff.pairing import Shares
from kvlink.memory import pool_of
from kvlink.plan import Conversions

if TYPE_CHECKING:
    from kvlink.layout import KVCache, MemoryRegion
    from kvlink.memory import SharedPool

__all__ = ["Life", "new_epoch", "whole_pool"]

# Nothing but a bell ends a wait for the last handoff; this is how soon a closing node is noticed.
_LOOK_AGAIN_S = 0.1


class Life:
    """One cache under one epoch: the native core over its memory, and how sources are reached.

    Keeps the cache's memory alive until ``forget_cache``.

    Attributes
    ----------
    given
        The cache as the user gave it; ``None`` once it is forgotten.
    cache
        The same, with its regions as peers see them.
    asker
        Asks other nodes in the name of this life.
    claimants
        Who is connected to read from here.
    caller
        Finds the connections that pushes go by.
    descriptor
        What a mint needs of this life.
    source
        The life as tickets name it.
    """

    def __init__(
        self,
        given: KVCache,
        cache: KVCache,
        *,
        epoch: bytes,
        name: str,
        address: str,
        engine: NativeEngine,
        keyring: Keyring,
        lanes: tuple[str, ...],
        limits: Limits,
        converts: Conversions,
    ) -> None:
        self.given: KVCache | None = given
        self._cache: KVCache | None = cache
        self.epoch = epoch
        self.engine = engine
        self._name = name
        self.groups = [
            Group(name=group.name, num_blocks=group.num_blocks, block_tokens=group.block_tokens, slots=group.slots)
            for group in cache.layout.groups
        ]
        self.descriptor = NodeDescriptor(
            kvlink=DESCRIPTOR_VERSION,
            name=name,
            address=address,
            epoch=epoch.hex(),
            groups=[
                GroupFacts(
                    name=group.name, num_blocks=group.num_blocks, block_tokens=group.block_tokens, slots=group.slots
                )
                for group in self.groups
            ],
        )
        self.source = self.descriptor.source
        self.introduction = Introduction(
            epoch=epoch,
            name=name,
            packed_layout=msgspec.msgpack.encode(cache.layout),
            region_addresses=tuple(region.address for region in cache.regions),
            mappable=tuple(whole_pool(region) is not None for region in cache.regions),
            keys=tuple(engine.pack_keys()),
            ucx_address=engine.ucx_address(),
        )
        self.asker = Asker(
            lambda: wire.IntroduceAsker(epoch=epoch, name=name, address=address),
            keyring=keyring,
            connect_timeout_s=limits.connect_timeout_s,
        )
        self.claimants = Claimants(engine.is_peer_lost)
        self.caller = Caller(self.asker, self.claimants, name=name, limits=limits)
        self.dialer = Dialer(
            engine,
            name=name,
            connector=Connector(engine, self.introduction, keyring=keyring, lanes=lanes),
            shares=Shares(cache.layout, epoch=epoch, converts=converts),
            limits=limits,
        )

    @property
    def cache(self) -> KVCache:
        """The cache; raises ``NotReady`` once it is forgotten."""
        if self._cache is None:
            raise NotReady(f"cache of {self._name}: the node is suspended and has none")
        return self._cache

    def wait_idle(self, *, until: float, called_off: Callable[[], bool]) -> dict[str, int]:
        """Wait until nothing lives here, or the time of the monotonic clock is `until`; return what is left.

        Raises ``OutOfMemory`` without a descriptor to wait with.
        """
        try:
            bell = select.epoll()
        except OSError as error:
            raise OutOfMemory(f"drain: no epoll instance: {error.strerror}") from None
        with bell:
            # Edge-triggered, since nobody reads this bell: see kvlink/handoff/awaiting.py.
            bell.register(self.engine.wake_fd(), select.EPOLLIN | select.EPOLLET)
            while True:
                left = dict(self.engine.holds())
                remaining_s = until - time.monotonic()
                if not any(left.values()) or remaining_s <= 0 or called_off():
                    return left
                bell.poll(min(remaining_s, _LOOK_AGAIN_S))

    def end(self, why: KvlinkError, *, deadline_s: float) -> None:
        """Fail what lives for `why` and end all connections. Idempotent.

        Whatever comes after fails like that too. When this returns, nothing here reads or writes
        the memory; a peer that mapped it lets go when it sees its connection end.
        """
        until = time.monotonic() + deadline_s
        self.asker.close(why)
        self.caller.close(why, deadline_s=deadline_s)
        self.dialer.close(deadline_s=max(0.0, until - time.monotonic()), why=why)
        self.engine.close(deadline_s=max(0.0, until - time.monotonic()), code=type(why).__name__, message=str(why))

    def forget_cache(self) -> None:
        """Let go of the memory, which may be freed from now on. Only once the life has ended."""
        self._cache = self.given = None


def new_epoch() -> bytes:
    """Return 128 random bits."""
    return os.urandom(16)


def whole_pool(region: MemoryRegion) -> SharedPool | None:
    """Return the pool that is exactly this region: peers map a pool as a whole or not at all."""
    pool = pool_of(region.address)
    return pool if pool is not None and (pool.address, pool.nbytes) == (region.address, region.nbytes) else None
