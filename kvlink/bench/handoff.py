"""How long one handoff takes, and many at once: from an offer that the target knows to its outcome.

The target has the tickets in hand. The clock of a handoff starts at its call of ``Node.pull`` and
stops when this process has seen its outcome, which it awaits on ``Node.fileno`` as an engine's loop
does: nothing is polled. The first handoff connects, and is not counted.
"""

from __future__ import annotations

import os
import select
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import numpy as np

import kvlink
from kvlink.bench.busy import busy_core
from kvlink.bench.handoff_source import SEED
from kvlink.bench.scattered import Geometry, Pool, Table, permutation
from kvlink.errors import DeadlineExceeded, InvalidArgument
from kvlink.testing import Worker

__all__ = ["HandoffRow", "HandoffSetting", "measure_handoffs"]

_GB = 1e9
_DEADLINE_S = 60.0


class HandoffRow(TypedDict):
    """What is reported of one size at one concurrency."""

    system: str
    lane: str
    blocks: int
    block_bytes: int
    concurrent: int
    handoffs: int
    threads: int
    busy: bool
    p50_us: float
    p99_us: float
    max_us: float
    percentiles_us: list[float]
    gbps: float
    gbps_one_large: float
    ratio_to_one_large: float
    verified: bool


@dataclass(frozen=True, kw_only=True)
class HandoffSetting:
    """What is measured: one row.

    Attributes
    ----------
    rounds
        How often `concurrent` handoffs are started together; the next round starts when all have ended.
    """

    blocks: int
    block_bytes: int
    concurrent: int
    rounds: int
    lane: str
    threads: int
    busy: bool

    def __post_init__(self) -> None:
        """Refuse what cannot be cut into K and V of 16 tokens."""
        if self.block_bytes % 256:
            raise InvalidArgument(f"block bytes {self.block_bytes} is not a multiple of 256 (K and V of 16 tokens)")

    @property
    def geometry(self) -> Geometry:
        """All blocks of a round, as one request."""
        moved = self.blocks * self.concurrent * self.block_bytes
        return Geometry(block_bytes=self.block_bytes // 2, total_bytes=moved)


@dataclass(kw_only=True)
class _Rounds:
    """What has been measured."""

    latencies_s: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    large_seconds: list[float] = field(default_factory=list)
    lanes: set[str] = field(default_factory=set)
    verified: bool = True


def measure_handoffs(setting: HandoffSetting) -> HandoffRow:
    """Run ``setting.rounds`` rounds between two processes and return their row.

    With more than one handoff at once, each round stands next to one large handoff of the same
    blocks, before or after it in turn.

    Raises
    ------
    KvlinkError
        Whatever a handoff may end with.
    """
    pool = Pool(setting.geometry, memory="kvlink")
    arguments = {"geometry": setting.geometry, "threads": setting.threads}
    done = _Rounds()
    with (
        Worker("kvlink.bench.handoff_source:HandoffSource", arguments=arguments) as source,
        kvlink.Node(pool.cache(), name="bench-target", copy_threads=setting.threads) as node,
    ):
        target = _Target(setting, node=node, pool=pool, source=source)
        target.move([permutation(setting.geometry, seed=0)], [permutation(setting.geometry, seed=1)], _Rounds())
        with busy_core(setting.busy):
            for index in range(1, setting.rounds + 1):
                target.round(index, done)
        source.call("close")
        source.close()
    return _row(setting, done)


class _Target:
    """The measuring side."""

    def __init__(self, setting: HandoffSetting, *, node: kvlink.Node, pool: Pool, source: Worker) -> None:
        self._setting = setting
        self._node = node
        self._pool = pool
        self._source = source
        self._bell = select.poll()
        self._bell.register(node.fileno(), select.POLLIN)

    def round(self, index: int, done: _Rounds) -> None:
        """Move one round's blocks as many handoffs, and as one where there are many."""
        setting = self._setting
        tables = permutation(setting.geometry, seed=2 * index), permutation(setting.geometry, seed=2 * index + 1)
        sources, targets = (np.split(table, setting.concurrent) for table in tables)
        if setting.concurrent == 1:
            done.seconds.append(self.move(sources, targets, done))
            return
        unrecorded = _Rounds()
        if index % 2:
            done.large_seconds.append(self.move([tables[0]], [tables[1]], unrecorded))
        done.seconds.append(self.move(sources, targets, done))
        if not index % 2:
            done.large_seconds.append(self.move([tables[0]], [tables[1]], unrecorded))
        done.verified &= unrecorded.verified

    def move(self, source_tables: Sequence[Table], target_tables: Sequence[Table], done: _Rounds) -> float:
        """Hand all tables over at once, note each one's latency, and return the seconds of all together."""
        self._pool.forget()
        tickets = self._source.call("offer", source_tables)
        lane = None if self._setting.lane == "auto" else self._setting.lane
        began_at, pulls = [], []
        for ticket, table in zip(tickets, target_tables, strict=True):
            began_at.append(time.perf_counter())
            pulls.append(self._node.pull(ticket, table, deadline_s=_DEADLINE_S, require=lane))
        ended_at = self._await(pulls)
        done.latencies_s += [ended - began for began, ended in zip(began_at, ended_at, strict=True)]
        for pull in pulls:
            pull.wait(timeout_s=0)
            done.lanes.add(pull.lane)
        self._source.call("finish", timeout_s=_DEADLINE_S)
        done.verified &= self._pool.holds(
            source_table=np.concatenate(source_tables), target_table=np.concatenate(target_tables), seed=SEED
        )
        return max(ended_at) - began_at[0]

    def _await(self, pulls: Sequence[Any]) -> list[float]:
        """Sleep on the node's descriptor until every outcome was seen; return when each was."""
        ended_at = [0.0] * len(pulls)
        waiting = list(enumerate(pulls))
        until = time.monotonic() + _DEADLINE_S
        while waiting:
            if not self._bell.poll(max(0.0, until - time.monotonic()) * 1000):
                raise DeadlineExceeded(f"{len(waiting)} handoffs have no outcome after {_DEADLINE_S:g} s")
            os.read(self._node.fileno(), 8)
            now = time.perf_counter()
            still = []
            for index, pull in waiting:
                if pull.outcome is None:
                    still.append((index, pull))
                else:
                    ended_at[index] = now
            waiting = still
        return ended_at


def _row(setting: HandoffSetting, done: _Rounds) -> HandoffRow:
    moved_gb = setting.geometry.moved_bytes / _GB
    latencies_us = np.array(done.latencies_s) * 1e6
    large = done.large_seconds or done.seconds  # one at once is the large one
    return HandoffRow(
        system="kvlink",
        lane="+".join(sorted(done.lanes)),
        blocks=setting.blocks,
        block_bytes=setting.block_bytes,
        concurrent=setting.concurrent,
        handoffs=len(done.latencies_s),
        threads=setting.threads,
        busy=setting.busy,
        p50_us=float(np.percentile(latencies_us, 50)),
        p99_us=float(np.percentile(latencies_us, 99)),
        max_us=float(latencies_us.max()),
        percentiles_us=[float(value) for value in np.percentile(latencies_us, range(101))],
        gbps=statistics.median(moved_gb / seconds for seconds in done.seconds),
        gbps_one_large=statistics.median(moved_gb / seconds for seconds in large),
        ratio_to_one_large=statistics.median(one / many for one, many in zip(large, done.seconds, strict=True)),
        verified=done.verified,
    )
