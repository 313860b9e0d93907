"""What a connected peer costs a node that has nothing to do: processor time and memory.

One node, the hub, is alone in its process. It is connected to many others, which live in four more
processes: once as the target that has read from all of them, and once as the source that all of
them have read from, with an offer that still lives. Then nothing happens for a while.
"""

from __future__ import annotations

import contextlib
import select
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypedDict

from kvlink.bench.idle_nodes import Usage
from kvlink.testing import Worker

__all__ = ["PROCESSES", "IdleRow", "IdleSetting", "measure_idle"]

PROCESSES = 4
_START_TIMEOUT_S = 300.0


class IdleRow(TypedDict):
    """What is reported of the hub in one role."""

    system: str
    lane: str
    role: str
    peers: int
    processes: int
    seconds: float
    cpu_percent: float
    rss_bytes_per_peer: float
    descriptors_per_peer: float
    threads: int


@dataclass(frozen=True, kw_only=True)
class IdleSetting:
    """What is measured: two rows.

    Attributes
    ----------
    peers
        Nodes that the hub is connected to.
    seconds
        How long nothing happens.
    lane
        How they read, one block each: what a lane keeps for a peer is there then.
    """

    peers: int
    seconds: float
    lane: str = "auto"

    def nodes(self, *, first: int, count: int) -> Worker:
        """Start some nodes in a process of their own."""
        arguments = {"first": first, "count": count, "lane": self.required}
        return Worker("kvlink.bench.idle_nodes:IdleNodes", arguments=arguments, timeout_s=_START_TIMEOUT_S)

    @property
    def required(self) -> str | None:
        """The lane that every pull names."""
        return None if self.lane == "auto" else self.lane


def measure_idle(setting: IdleSetting) -> list[IdleRow]:
    """Start the nodes, connect them to a hub in either role, and return a row a role.

    Raises
    ------
    KvlinkError
        If a node cannot start, or cannot be connected.
    """
    with _nodes(setting) as processes:
        return [_measure(setting, processes, role) for role in ("target", "source")]


@contextlib.contextmanager
def _nodes(setting: IdleSetting) -> Iterator[list[Worker]]:
    count = min(PROCESSES, setting.peers)
    bounds = [setting.peers * index // count for index in range(count + 1)]
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(setting.nodes(first=first, count=end - first)) for first, end in pairwise(bounds)]


def _measure(setting: IdleSetting, processes: Sequence[Worker], role: str) -> IdleRow:
    with (
        Worker("kvlink.bench.idle_nodes:IdleHub", arguments={"lane": setting.required}) as hub,
        setting.nodes(first=setting.peers, count=1) as first,
    ):
        # What the first peer costs, code that is loaded and buffers that grow, is not what a peer costs.
        _connect(hub, [first], role, peers=1)
        before: Usage = hub.call("usage")
        _connect(hub, processes, role, peers=setting.peers)
        began: Usage = hub.call("usage")
        select.select([], [], [], setting.seconds)  # the thing measured is time in which nothing happens
        ended: Usage = hub.call("usage")
    peers = began["peers"] - before["peers"]
    return IdleRow(
        system="kvlink",
        lane=setting.lane,
        role=role,
        peers=peers,
        processes=len(processes),
        seconds=ended["at_s"] - began["at_s"],
        cpu_percent=100 * (ended["cpu_s"] - began["cpu_s"]) / (ended["at_s"] - began["at_s"]),
        rss_bytes_per_peer=(began["rss_bytes"] - before["rss_bytes"]) / peers,
        descriptors_per_peer=(began["descriptors"] - before["descriptors"]) / peers,
        threads=ended["threads"],
    )


def _connect(hub: Worker, processes: Sequence[Worker], role: str, *, peers: int) -> None:
    if role == "target":
        for process in processes:
            hub.call("pull", process.call("offer"), timeout_s=_START_TIMEOUT_S)
        return
    ticket = hub.call("offer", readers=peers + 1)  # one more than there are: it lives on
    for process in processes:
        process.start("pull", ticket)
    for process in processes:
        process.result(timeout_s=_START_TIMEOUT_S)
