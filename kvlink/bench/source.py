"""The other process of `kvlink bench transfer`: it offers its blocks and counts its own CPU time."""

from __future__ import annotations

import time
from typing import Any

import kvlink
from kvlink.bench.scattered import Geometry, Pool, Table

__all__ = ["BenchSource"]

SEED = 20
_TTL_S = 300.0


class BenchSource:
    """A node over one pool whose every 8 bytes are known. Lives in a `kvlink.testing.Worker`."""

    def __init__(self, *, geometry: Geometry, memory: str, threads: int, **node: Any) -> None:
        """Fill the pool and start the node, with further settings of it in `node`."""
        self._pool = Pool(geometry, memory=memory)
        self._pool.fill(seed=SEED)
        self._geometry = geometry
        self._node = kvlink.Node(self._pool.cache(), name="bench-source", copy_threads=threads, **node)
        self._offer: Any = None
        self._cpu_s = 0.0

    def offer(self, table: Table) -> dict[str, Any]:
        """Offer the blocks of `table`; counts CPU time from here until `finish`."""
        self._cpu_s = time.process_time()
        self._offer = self._node.offer(blocks=table, num_tokens=self._geometry.num_tokens, ttl_s=_TTL_S)
        ticket: dict[str, Any] = self._offer.ticket
        return ticket

    def finish(self, *, timeout_s: float = _TTL_S) -> float:
        """Wait until the offer was confirmed and return the CPU seconds of this process since `offer`."""
        self._offer.wait(timeout_s=timeout_s)
        return time.process_time() - self._cpu_s

    def close(self) -> None:
        """Stop the node."""
        self._node.close()
