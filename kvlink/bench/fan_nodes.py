"""The processes of `kvlink bench fanout` and `kvlink bench incast`: nodes that offer, and nodes that read."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import kvlink
from kvlink.bench.scattered import BLOCK_TOKENS, Geometry, Pool, Table, expected_words
from kvlink.errors import DeadlineExceeded

__all__ = ["FanSource", "FanTarget"]

_TTL_S = 300.0
_DEADLINE_S = 60.0
_CHECKED_BLOCKS = 64


class FanSource:
    """A node over one pool whose every 8 bytes are known. Lives in a `kvlink.testing.Worker`."""

    def __init__(self, *, geometry: Geometry, threads: int, seed: int) -> None:
        """Fill the pool and start the node."""
        pool = Pool(geometry, memory="kvlink")
        pool.fill(seed=seed)
        self._node = kvlink.Node(pool.cache(), name=f"bench-source-{seed}", copy_threads=threads)
        self._offers: list[Any] = []

    def offer(self, tables: Sequence[Table]) -> list[dict[str, Any]]:
        """Offer the blocks of each of `tables`, and return the tickets."""
        self._offers = [
            self._node.offer(blocks=table, num_tokens=len(table) * BLOCK_TOKENS, ttl_s=_TTL_S) for table in tables
        ]
        return [offer.ticket for offer in self._offers]

    def finish(self) -> None:
        """Wait until every offer was confirmed."""
        for offer in self._offers:
            offer.wait(timeout_s=_TTL_S)

    def close(self) -> None:
        """Stop the node."""
        self._node.close()


class FanTarget:
    """A node that reads one or several offers at once. Lives in a `kvlink.testing.Worker`."""

    def __init__(self, *, geometry: Geometry, threads: int) -> None:
        """Start the node."""
        self._pool = Pool(geometry, memory="kvlink")
        self._geometry = geometry
        self._node = kvlink.Node(self._pool.cache(), name=f"bench-target-{os.getpid()}", copy_threads=threads)
        self._lane = ""

    def forget(self) -> None:
        """Overwrite everything, so that what was read before cannot pass for new."""
        self._pool.forget()

    def pull(
        self, tickets: Sequence[dict[str, Any]], tables: Sequence[Table], *, begin_at: float, lane: str | None
    ) -> list[tuple[float, float]]:
        """Read each ticket into its table, all from `begin_at` on; return when each began and ended.

        Times are those of the monotonic clock, which is the same in all processes of a host.
        """
        while time.monotonic() < begin_at:
            select.select([], [], [], max(0.0, begin_at - time.monotonic()))
        pulls, began = [], []
        for ticket, table in zip(tickets, tables, strict=True):
            began.append(time.monotonic())
            pulls.append(self._node.pull(ticket, table, deadline_s=_DEADLINE_S, require=lane))
        ended = self._await(pulls)
        for pull in pulls:
            pull.wait(timeout_s=0)
            self._lane = pull.lane
        return list(zip(began, ended, strict=True))

    def lane(self) -> str:
        """Return how the last bytes came."""
        return self._lane

    def holds(self, *, source: Geometry, source_table: Table, target_table: Table, seed: int) -> bool:
        """Return whether the blocks of `target_table` are those of `source_table` in the pool of `seed`."""
        blocks = self._pool.bytes.view(np.uint64).reshape(2, self._geometry.pool_blocks, -1)
        for part in (0, 1):
            for first in range(0, len(source_table), _CHECKED_BLOCKS):
                here = slice(first, first + _CHECKED_BLOCKS)
                expected = expected_words(source, part=part, blocks=source_table[here], seed=seed)
                if not np.array_equal(blocks[part, target_table[here]], expected):
                    return False
        return True

    def close(self) -> None:
        """Stop the node."""
        self._node.close()

    def _await(self, pulls: Sequence[Any]) -> list[float]:
        """Sleep on the node's descriptor until every outcome was seen; return when each was."""
        ended = [0.0] * len(pulls)
        waiting = dict(enumerate(pulls))
        until = time.monotonic() + _DEADLINE_S
        while waiting:
            if not select.select([self._node.fileno()], [], [], max(0.0, until - time.monotonic()))[0]:
                raise DeadlineExceeded(f"{len(waiting)} handoffs have no outcome after {_DEADLINE_S:g} s")
            os.read(self._node.fileno(), 8)
            now = time.monotonic()
            for index in [index for index, pull in waiting.items() if pull.outcome is not None]:
                ended[index] = now
                del waiting[index]
        return ended
