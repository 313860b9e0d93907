"""Move scattered blocks from one process to another, next to a plain memcpy of the same blocks, again and again.

A repetition is timed from `Node.pull` until the source has confirmed it: planning, claiming,
copying and confirming all count. The limit is one thread of the C library's memcpy over the
same number of equally scattered blocks between two private pools of this process, measured
right before or right after (alternating), so that a slower moment of the machine meets both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypedDict

import kvlink
from kvlink import _native
from kvlink.bench.lane_reasons import lane_reasons
from kvlink.bench.scattered import Geometry, Pool, Table, permutation, run_offsets
from kvlink.bench.source import SEED
from kvlink.testing import Worker

__all__ = ["Repetition", "Row", "Setting", "measure"]

_GB = 1e9
_DEADLINE_S = 120.0


class Row(TypedDict):
    """What is reported of one block size on one lane."""

    system: str
    lane: str
    lane_reason: str
    op: str
    memory: str
    threads: int
    block_bytes: int
    blocks: int
    gbps_median: float
    gbps_min: float
    gbps_max: float
    post_us_median: float
    cpu_s_per_gb_source: float
    cpu_s_per_gb_target: float
    memcpy_gbps: float
    ratio_to_memcpy: float
    verified: bool


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is measured: one row."""

    geometry: Geometry
    lane: str
    memory: str
    threads: int
    repeat: int


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """One handoff and the memcpy next to it."""

    seconds: float
    memcpy_seconds: float
    post_seconds: float
    cpu_source_s: float
    cpu_target_s: float
    lane: str
    verified: bool


@dataclass(kw_only=True)
class _Reference:
    """Two private pools and the memcpy between them."""

    geometry: Geometry
    source: Pool = field(init=False)
    target: Pool = field(init=False)

    def __post_init__(self) -> None:
        self.source = Pool(self.geometry, memory="private")
        self.target = Pool(self.geometry, memory="private")

    def seconds(self, *, seed: int) -> float:
        source_table, target_table = _tables(self.geometry, seed)
        return _native.memcpy_seconds(
            source=self.source.bytes,
            target=self.target.bytes,
            source_offsets=run_offsets(self.geometry, source_table),
            target_offsets=run_offsets(self.geometry, target_table),
            run_bytes=self.geometry.block_bytes,
        )


def measure(setting: Setting, *, on_repetition: Callable[[Repetition], None] | None = None) -> Row:
    """Run one warm-up and ``setting.repeat`` repetitions in two processes and return their row.

    Raises
    ------
    LaneUnavailable
        If the lane that ``setting.lane`` names cannot be used between the two processes.
    KvlinkError
        Whatever a handoff may end with.
    """
    geometry = setting.geometry
    reference = _Reference(geometry=geometry)
    pool = Pool(geometry, memory=setting.memory)
    arguments = {"geometry": geometry, "memory": setting.memory, "threads": setting.threads}
    repetitions = []
    with (
        Worker("kvlink.bench.source:BenchSource", arguments=arguments) as source,
        kvlink.Node(pool.cache(), name="bench-target", copy_threads=setting.threads) as node,
    ):
        # The first handoff maps the peer's pool, and is not counted: that happens once a peer.
        for index in range(setting.repeat + 1):
            repetition = _repeat(setting, index, source=source, node=node, pool=pool, reference=reference)
            if index:
                repetitions.append(repetition)
                if on_repetition is not None:
                    on_repetition(repetition)
        lane_reason = lane_reasons(node)
        source.call("close")
        source.close()
    return _row(setting, repetitions, lane_reason=lane_reason)


def _repeat(
    setting: Setting, index: int, *, source: Worker, node: kvlink.Node, pool: Pool, reference: _Reference
) -> Repetition:
    geometry = setting.geometry
    source_table, target_table = _tables(geometry, index)
    pool.forget()
    before = reference.seconds(seed=index) if index % 2 else None
    ticket = source.call("offer", source_table)
    cpu_started, started = time.process_time(), time.perf_counter()
    pull = node.pull(
        ticket, target_table, deadline_s=_DEADLINE_S, require=None if setting.lane == "auto" else setting.lane
    )
    pull.wait(timeout_s=_DEADLINE_S)
    seconds, cpu_target_s = time.perf_counter() - started, time.process_time() - cpu_started
    cpu_source_s = source.call("finish", timeout_s=_DEADLINE_S)
    return Repetition(
        seconds=seconds,
        memcpy_seconds=before if before is not None else reference.seconds(seed=index),
        post_seconds=pull.phases_s["post"],
        cpu_source_s=cpu_source_s,
        cpu_target_s=cpu_target_s,
        lane=pull.lane,
        verified=pool.holds(source_table=source_table, target_table=target_table, seed=SEED),
    )


def _tables(geometry: Geometry, index: int) -> tuple[Table, Table]:
    return permutation(geometry, seed=2 * index), permutation(geometry, seed=2 * index + 1)


def _row(setting: Setting, repetitions: list[Repetition], *, lane_reason: str) -> Row:
    geometry = setting.geometry
    moved_gb = geometry.moved_bytes / _GB
    speeds = [moved_gb / repetition.seconds for repetition in repetitions]
    return Row(
        system="kvlink",
        lane="+".join(sorted({repetition.lane for repetition in repetitions})),
        lane_reason=lane_reason,
        op="pull",
        memory=setting.memory,
        threads=setting.threads,
        block_bytes=geometry.block_bytes,
        blocks=geometry.runs,
        gbps_median=statistics.median(speeds),
        gbps_min=min(speeds),
        gbps_max=max(speeds),
        post_us_median=statistics.median(repetition.post_seconds * 1e6 for repetition in repetitions),
        cpu_s_per_gb_source=statistics.median(repetition.cpu_source_s / moved_gb for repetition in repetitions),
        cpu_s_per_gb_target=statistics.median(repetition.cpu_target_s / moved_gb for repetition in repetitions),
        memcpy_gbps=statistics.median(moved_gb / repetition.memcpy_seconds for repetition in repetitions),
        ratio_to_memcpy=statistics.median(repetition.memcpy_seconds / repetition.seconds for repetition in repetitions),
        verified=all(repetition.verified for repetition in repetitions),
    )
