"""The other process of `kvlink bench layout`: the source ranks, and the mint that makes their tickets."""

from __future__ import annotations

from typing import Any

import kvlink
from kvlink.bench.ranks import RankPool, Request
from kvlink.bench.source import SEED

__all__ = ["RankSources"]

_TTL_S = 300.0


class RankSources:
    """A node over the memory of each source rank of a pair. Lives in a `kvlink.testing.Worker`."""

    def __init__(self, *, request: Request, threads: int) -> None:
        """Fill the memory and start the nodes."""
        self._request = request
        self._nodes = []
        self._layouts = []
        for number, rank in enumerate(request.pair.sources):
            pool = RankPool(rank, request)
            pool.fill(seed=SEED)
            cache = pool.cache()
            self._layouts.append(cache.layout)
            self._nodes.append(kvlink.Node(cache, name=f"bench-source-{number}", copy_threads=threads))
        self._mint = kvlink.TicketMint([node.descriptor for node in self._nodes])
        self._offers: list[Any] = []

    def layouts(self) -> list[Any]:
        """Return the layout of each rank, for the memcpy of the same runs."""
        return self._layouts

    def offer(self, table: Any) -> dict[str, Any]:
        """Offer the blocks of `table` on every rank, under one ticket: an engine's ranks share their block table."""
        ticket = self._mint.offer(num_tokens=self._request.num_tokens, ttl_s=_TTL_S)
        self._offers = [node.offer(blocks=table, ticket=ticket) for node in self._nodes]
        return ticket

    def finish(self) -> None:
        """Wait until every rank's offer was confirmed."""
        for offer in self._offers:
            offer.wait(timeout_s=_TTL_S)

    def close(self) -> None:
        """Stop the nodes."""
        for node in self._nodes:
            node.close()
