"""An allocator of block numbers that knows which handoffs still use them."""

from __future__ import annotations

import operator
import random
import threading
from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

from kvlink.errors import InvalidArgument, OutOfMemory
from kvlink.handoff.arguments import check_count

__all__ = ["BlockCounts", "BlockPool", "Releasable"]

_MOST_BLOCKS = 1 << 31


class Releasable(Protocol):
    """What a pool asks of a handle: an ``Offer`` or a ``Pull``."""

    @property
    def released(self) -> bool:
        """Whether the blocks may be used for something else; once true, for good. Cheap."""


_H = TypeVar("_H", bound=Releasable)


class BlockCounts(NamedTuple):
    """Where the blocks of a pool are. The three add up to all of them, at every moment."""

    free: int
    held: int
    quarantined: int


class BlockPool:
    """Hands out the blocks of one group, and takes none back for good before its handoffs have released it.

    A block is *free*, *held* by whoever allocated it, or *quarantined*: its owner has freed it, and
    a handle that it was given to is not released yet. Optional: an engine that has an allocator of
    its own waits for ``released`` itself. Pure Python, thread-safe, and never waits.

    Blocks are handed out in order at first, then the last freed first. With `shuffle_seed` the first
    order is scattered, as it becomes anyway in a worker that has run for a while.

        blocks = pool.allocate(3)
        try:
            pull = pool.give(blocks, node.pull(ticket, blocks))
            pull.wait()
            ...
        finally:
            pool.free(blocks)  # at once, or as soon as the pull is released

    Raises
    ------
    InvalidArgument
        If `num_blocks` is no count.
    """

    def __init__(self, num_blocks: int, *, shuffle_seed: int | None = None) -> None:
        self._num_blocks = check_count(num_blocks, low=0, high=_MOST_BLOCKS, called="block pool: num_blocks")
        # Reversed, so that pop() takes block 0 first.
        self._free = list(range(self._num_blocks - 1, -1, -1))
        if shuffle_seed is not None:
            random.Random(shuffle_seed).shuffle(self._free)
        self._held: dict[int, list[Releasable]] = {}  # with the handles that each was given to
        self._quarantined: dict[int, list[Releasable]] = {}
        # Re-entrant: the garbage collector may run anything in the middle of anything.
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        """Tell the counts."""
        free, held, quarantined = self.counts()
        return f"<kvlink.BlockPool of {self._num_blocks}: {free} free, {held} held, {quarantined} quarantined>"

    @property
    def num_blocks(self) -> int:
        """All blocks."""
        return self._num_blocks

    @property
    def num_free(self) -> int:
        """How many blocks can be allocated now."""
        return self.counts().free

    def counts(self) -> BlockCounts:
        """Return how many blocks are free, held and quarantined; together they are all blocks."""
        with self._lock:
            self._take_released()
            return BlockCounts(len(self._free), len(self._held), len(self._quarantined))

    def allocate(self, count: int) -> tuple[int, ...]:
        """Take `count` blocks, or none.

        Raises
        ------
        OutOfMemory
            If fewer than `count` blocks are free.
        InvalidArgument
            If `count` is no count.
        """
        count = check_count(count, low=0, high=_MOST_BLOCKS, called="allocate blocks: count")
        with self._lock:
            self._take_released()
            if count > len(self._free):
                raise OutOfMemory(
                    f"allocate {count} blocks: {len(self._free)} of {self._num_blocks} are free, {len(self._held)} are "
                    f"held and {len(self._quarantined)} wait for handoffs to be released; free some or make more"
                )
            first = len(self._free) - count
            taken = tuple(reversed(self._free[first:]))
            self._held.update((block, []) for block in taken)
            del self._free[first:]
            return taken

    def give(self, blocks: Sequence[int], handle: _H) -> _H:
        """Note that `handle` uses `blocks`, which are held here, and return it. All or none.

        A block may be given to several handles, as where requests share a prefix.

        Raises
        ------
        InvalidArgument
            If one of the blocks is not held, or stands twice in `blocks`.
        """
        with self._lock:
            live = self._live_handles(blocks, "give")
            for block, handles in live.items():
                self._held[block] = [*handles, handle]
        return handle

    def free(self, blocks: Sequence[int]) -> None:
        """Give `blocks` back, all or none: each at once, or as soon as all handles it was given to are released.

        Raises
        ------
        InvalidArgument
            If one of them is not held, freed before for example, or stands twice in `blocks`.
        """
        with self._lock:
            live = self._live_handles(blocks, "free")
            for block, handles in reversed(live.items()):
                if handles:
                    self._quarantined[block] = handles
                else:
                    self._free.append(block)
                del self._held[block]

    def _live_handles(self, blocks: Sequence[int], operation: str) -> dict[int, list[Releasable]]:
        """Return the handles of each block that are not released yet; refuse what is not held. Changes nothing."""
        live: dict[int, list[Releasable]] = {}
        asked = _Asked()
        for given in blocks:
            try:
                block = operator.index(given)
            except TypeError:
                raise InvalidArgument(f"{operation} blocks: {given!r} is no block number") from None
            if block in live:
                raise InvalidArgument(f"{operation} blocks: block {block} stands twice among them")
            if block not in self._held:
                state = "freed already" if block in self._quarantined else "not allocated"
                raise InvalidArgument(f"{operation} blocks: block {block} is {state}")
            live[block] = asked.live(self._held[block])
        return live

    def _take_released(self) -> None:
        """Move what no handle uses any more out of quarantine. Handles have no callbacks: each call looks."""
        asked = _Asked()
        released = [block for block, handles in self._quarantined.items() if not asked.live(handles)]
        for block in released:
            self._free.append(block)
            del self._quarantined[block]


class _Asked:
    """Asks each handle once, however many blocks it has."""

    def __init__(self) -> None:
        self._released: dict[int, bool] = {}  # by identity: a handle need not be hashable

    def live(self, handles: list[Releasable]) -> list[Releasable]:
        """Return those that are not released."""
        return [handle for handle in handles if not self._is_released(handle)]

    def _is_released(self, handle: Releasable) -> bool:
        key = id(handle)
        if key not in self._released:
            self._released[key] = handle.released
        return self._released[key]
