"""The other processes of `kvlink bench idle`: many small nodes in each, and the one that is measured."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import kvlink
from kvlink.bench.scattered import BLOCK_TOKENS, Geometry, Pool
from kvlink.errors import Busy

__all__ = ["GEOMETRY", "IdleHub", "IdleNodes", "Usage"]

#: The smallest cache there is: what is measured is what a peer costs, and not its blocks.
GEOMETRY = Geometry(block_bytes=4096, total_bytes=4 << 13)
_TTL_S = 3600.0
_DEADLINE_S = 60.0
_LIMITS = kvlink.Limits(pending_connects=4096, pending_handshakes=4096, connect_timeout_s=_DEADLINE_S)


class Usage(TypedDict):
    """What a process has used so far, and has now."""

    at_s: float
    cpu_s: float
    rss_bytes: int
    descriptors: int
    threads: int
    peers: int


class IdleNodes:
    """Some nodes in one process. Lives in a `kvlink.testing.Worker`."""

    def __init__(self, *, first: int, count: int, lane: str | None) -> None:
        """Start `count` nodes, numbered from `first`, which read by `lane`, or by any."""
        self._lane = lane
        self._nodes = [_node(f"idle-{number}") for number in range(first, first + count)]

    def offer(self) -> list[dict[str, Any]]:
        """Offer one block of each node to one reader, and return the tickets."""
        return [node.offer([0], num_tokens=BLOCK_TOKENS, ttl_s=_TTL_S).ticket for node in self._nodes]

    def pull(self, ticket: Mapping[str, Any]) -> None:
        """Read `ticket` at every node."""
        _await([node.pull(ticket, [1], deadline_s=_DEADLINE_S, require=self._lane) for node in self._nodes])


class IdleHub:
    """The node that is measured. Lives in a `kvlink.testing.Worker`."""

    def __init__(self, *, lane: str | None) -> None:
        """Start the node, which reads by `lane`, or by any."""
        self._lane = lane
        self._node = _node("hub")
        self._offer: Any = None

    def offer(self, *, readers: int) -> dict[str, Any]:
        """Offer one block to `readers` nodes, and return the ticket. The offer lives on."""
        self._offer = self._node.offer([0], num_tokens=BLOCK_TOKENS, ttl_s=_TTL_S, readers=readers)
        ticket: dict[str, Any] = self._offer.ticket
        return ticket

    def pull(self, tickets: Sequence[Mapping[str, Any]]) -> None:
        """Read every one of `tickets`."""
        for ticket in tickets:  # one block after the other: there is one place for them
            _await([self._node.pull(ticket, [1], deadline_s=_DEADLINE_S, require=self._lane)])

    def usage(self) -> Usage:
        """Return what this process has used so far, and has now."""
        root = Path("/proc/self")
        ready = sum(peer["state"] == "ready" for peer in self._node.peers())
        pages = int((root / "statm").read_text(encoding="ascii").split()[1])
        return Usage(
            at_s=time.monotonic(),
            cpu_s=time.process_time(),
            rss_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
            descriptors=len(list((root / "fd").iterdir())),
            threads=len(list((root / "task").iterdir())),
            peers=ready,
        )


def _node(name: str) -> kvlink.Node:
    return kvlink.Node(Pool(GEOMETRY, memory="kvlink").cache(), name=name, copy_threads=1, limits=_LIMITS)


def _await(pulls: Sequence[Any]) -> None:
    for pull in pulls:
        pull.wait(timeout_s=_DEADLINE_S)
        if not pull.wait_released(timeout_s=_DEADLINE_S):
            raise Busy(f"{pull} has not let go of its blocks")
