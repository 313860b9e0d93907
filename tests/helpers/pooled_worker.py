"""What runs inside a worker process of the tests of `kvlink.BlockPool`: an engine that frees its blocks at any time."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from helpers.tagged_pool import TaggedPool
from kvlink import BlockPool, errors
from kvlink.testing import FaultScript, inject_faults

RELEASED_S = 10.0


class PooledWorker:
    """A node whose blocks a pool hands out, and a thread that looks at the pool's counts all the time."""

    def open(self, *, blocks: int, **options: Any) -> None:
        """Start the node and the thread."""
        self._memory = TaggedPool(blocks=blocks, **options)
        self._pool = BlockPool(blocks, shuffle_seed=blocks)
        self._handles: list[Any] = []
        self._tag = 1_000_000
        self._over = threading.Event()
        self._looks = Counter[str]()
        self._watching = threading.Thread(target=self._watch, daemon=True)
        self._watching.start()

    def offer(self, count: int) -> Any:
        """Offer new blocks, and return the ticket; free them while readers may still come. None without room."""
        return self._use(
            count, lambda blocks: self._memory.node.offer(blocks=blocks, num_tokens=count, ttl_s=0.2)
        ).ticket

    def pull(self, ticket: Any, count: int, *, cancel_after_s: float | None, script: FaultScript) -> None:
        """Pull into new blocks, cancel that in the middle, and free the blocks whatever came of it."""
        inject_faults(self._memory.node, script)
        handle = self._use(count, lambda blocks: self._memory.node.pull(ticket, blocks=blocks, deadline_s=5))
        if cancel_after_s is not None:
            until = time.perf_counter() + cancel_after_s
            while time.perf_counter() < until:
                pass
            handle.cancel()
        self._use_what_is_free()

    def finish(self, *, cancel: bool) -> tuple[dict[str, int], dict[str, int]]:
        """Wait until all handles are released, and return how they ended and what the thread has seen."""
        for handle in self._handles:
            if cancel:
                handle.cancel()
            assert handle.wait_released(timeout_s=RELEASED_S), handle
        assert self._pool.counts() == (self._pool.num_blocks, 0, 0), self._pool
        assert not any(self._memory.node.holds().values())
        self._use_what_is_free()
        self._over.set()
        self._watching.join(timeout=5)
        assert not self._watching.is_alive()
        assert not self._looks["wrong"], self._looks
        return dict(Counter(type(handle.error).__name__ for handle in self._handles)), dict(self._looks)

    def close(self) -> None:
        """Close the node."""
        self._memory.close()

    def _use(self, count: int, start: Callable[[list[int]], Any]) -> Any:
        blocks = self._allocate(count)
        try:
            self._fill(blocks)
            handle = self._pool.give(blocks, start(list(blocks)))  # BlocksBusy: a block came back too early
        finally:
            self._pool.free(blocks)
        self._handles.append(handle)
        return handle

    def _allocate(self, count: int) -> tuple[int, ...]:
        until = time.monotonic() + RELEASED_S
        while True:
            try:
                return self._pool.allocate(count)
            except errors.OutOfMemory:
                self._looks["full"] += 1
                assert time.monotonic() < until, self._pool
                self._handles[0].wait_released(timeout_s=0.002)
                self._handles = [*self._handles[1:], self._handles[0]]

    def _fill(self, blocks: tuple[int, ...]) -> None:
        self._tag += len(blocks)
        self._memory.fill(blocks, first_tag=self._tag)

    def _use_what_is_free(self) -> None:
        """Fill every free block: whoever still writes one of them is found out."""
        blocks = self._pool.allocate(self._pool.num_free)
        try:
            self._fill(blocks)
            time.sleep(0.001)  # what a late write needs to be seen; none is waited for
            self._memory.check(blocks)
        finally:
            self._pool.free(blocks)

    def _watch(self) -> None:
        while not self._over.wait(timeout=0.0002):
            counts = self._pool.counts()
            self._looks["all"] += 1
            self._looks["wrong"] += sum(counts) != self._pool.num_blocks
            self._looks["quarantined"] += counts.quarantined > 0
