"""Requests that found no room: who is next, and who may go before them."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Collection, Hashable, Sequence

from kvlink.errors import Busy
from kvlink.scheduler.book import Book, Placement, Shelf

__all__ = ["Waiter", "Waiting"]

# A request that finds no room lets so many go before it that do; then nobody passes it any more, until room comes.
_MOST_PASSING = 16
# Who is looked at when room has come. Those behind are looked at once some of these have left.
_MOST_LOOKED_AT = 32
_MOST_WAITING = 1 << 16


class Waiter:
    """One request. Changed under the scheduler's lock only, but for its future."""

    def __init__(
        self,
        num_tokens: int,
        prefix_hashes: Sequence[Hashable],
        *,
        without: Collection[Shelf] = (),
        priority: int,
        until: float,
    ) -> None:
        self.num_tokens = num_tokens
        self.prefix_hashes = prefix_hashes
        self.without = without
        self.priority = priority
        self.order = (-priority, until)
        self.placement: Placement | None = None
        self.has_left = False
        self.passed = 0
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] = self._loop.create_future()

    async def wait(self, timeout_s: float) -> None:
        """Wait until there is a placement; raises ``TimeoutError``."""
        await asyncio.wait_for(asyncio.shield(self._future), timeout_s)  # it may be waited for again

    def wake(self) -> None:
        """End the wait, from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._set)

    def _set(self) -> None:
        if not self._future.done():
            self._future.set_result(None)


class Waiting:
    """Who waits, the highest priority first, and of one priority the earliest deadline. Not thread-safe."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float], int, Waiter]] = []
        self._arrivals = itertools.count()
        self._count = 0

    def __len__(self) -> int:
        """Return how many wait."""
        return self._count

    def add(self, waiter: Waiter) -> None:
        """Let `waiter` wait. Raises ``Busy`` if too many do."""
        if self._count >= _MOST_WAITING:
            raise Busy(f"place: {self._count} requests wait for room already")
        heapq.heappush(self._heap, (waiter.order, next(self._arrivals), waiter))
        self._count += 1

    def leave(self, waiter: Waiter) -> None:
        """Let `waiter` go, whether it has a placement or not. Idempotent."""
        if not waiter.has_left:
            waiter.has_left = True
            self._count -= 1
            # Without this, requests that give up while nothing is released would pile up.
            if len(self._heap) > 2 * self._count + _MOST_LOOKED_AT:
                self._heap = [entry for entry in self._heap if not entry[2].has_left]
                heapq.heapify(self._heap)

    def serve(self, book: Book) -> list[Waiter]:
        """Give room to those whose turn it is; return them, to be woken. They have left."""
        served: list[Waiter] = []
        without_room: list[tuple[tuple[int, float], int, Waiter]] = []
        looked_at = 0
        while self._heap and looked_at < _MOST_LOOKED_AT:
            entry = heapq.heappop(self._heap)
            waiter = entry[2]
            if waiter.has_left:
                continue
            looked_at += 1
            waiter.placement = book.place(
                waiter.num_tokens,
                waiter.prefix_hashes,
                priority=waiter.priority,
                without=waiter.without,
            )
            if waiter.placement is not None:
                waiter.has_left = True
                self._count -= 1
                served.append(waiter)
                for _, _, earlier in without_room:
                    earlier.passed += 1
                continue
            without_room.append(entry)
            if waiter.passed >= _MOST_PASSING:
                break
        for entry in without_room:
            heapq.heappush(self._heap, entry)
        return served
