"""The other process of `kvlink bench handoff`: it offers some requests' blocks together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import kvlink
from kvlink.bench.scattered import BLOCK_TOKENS, Geometry, Pool, Table

__all__ = ["SEED", "HandoffSource"]

SEED = 21
_TTL_S = 300.0


class HandoffSource:
    """A node over one pool whose every 8 bytes are known. Lives in a `kvlink.testing.Worker`."""

    def __init__(self, *, geometry: Geometry, threads: int) -> None:
        """Fill the pool and start the node."""
        self._pool = Pool(geometry, memory="kvlink")
        self._pool.fill(seed=SEED)
        self._node = kvlink.Node(self._pool.cache(), name="bench-source", copy_threads=threads)
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
