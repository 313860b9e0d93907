"""Hand over between ranks of unlike layouts in two processes, next to a memcpy of the very same runs.

A repetition is timed from `Node.pull` until every source has confirmed it. The limit is one thread
of the C library's memcpy over the runs of that request, of the same lengths and in the same order,
between private pools of this process, right before or right after (alternating). With another pair
to compare with, each repetition of the one stands next to one of the other, in turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypedDict

import kvlink
from kvlink.bench.lane_reasons import lane_reasons
from kvlink.bench.ranks import PAIRS, RankPool, Request
from kvlink.bench.runs import RunReference
from kvlink.bench.source import SEED
from kvlink.errors import InvalidArgument
from kvlink.testing import Worker

__all__ = ["LayoutRow", "LayoutSetting", "measure_layout"]

_GB = 1e9
_DEADLINE_S = 120.0


class LayoutRow(TypedDict):
    """What is reported of one pair of layouts."""

    system: str
    pair: str
    lane: str
    lane_reason: str
    threads: int
    sources: int
    run_bytes: int
    runs: int
    moved_bytes: int
    gbps_median: float
    gbps_min: float
    gbps_max: float
    memcpy_gbps: float
    ratio_to_memcpy: float
    ratio_min: float
    ratio_max: float
    against: str
    ratio_to_against: float | None
    ratio_to_against_min: float | None
    ratio_to_against_max: float | None
    verified: bool


@dataclass(frozen=True, kw_only=True)
class LayoutSetting:
    """What is measured: one row. `against` names the pair whose speed stands beside it, or is empty."""

    pair: str
    total_bytes: int
    lane: str
    threads: int
    repeat: int
    against: str = ""

    def __post_init__(self) -> None:
        """Refuse a pair that does not exist."""
        for pair in (self.pair, self.against) if self.against else (self.pair,):
            if pair not in PAIRS:
                raise InvalidArgument(f"pair is {pair!r}, none of {', '.join(PAIRS)}")


@dataclass(frozen=True, kw_only=True)
class _Repetition:
    seconds: float
    memcpy_seconds: float
    lane: str
    run_bytes: int
    runs: int
    verified: bool


def measure_layout(setting: LayoutSetting) -> LayoutRow:
    """Run one warm-up and ``setting.repeat`` repetitions in two processes and return their row.

    Raises
    ------
    LaneUnavailable
        If the lane that ``setting.lane`` names cannot be used between the two processes.
    KvlinkError
        Whatever a handoff may end with.
    """
    with ExitStack() as stack:
        names = [setting.pair, *([setting.against] if setting.against else [])]
        benches = [stack.enter_context(_opened(setting, name)) for name in names]
        # The first handoff connects and maps, and is not counted: that happens once a pair of peers.
        warm_ups = [bench.repeat(0) for bench in benches]
        measured: list[list[_Repetition]] = [[] for _ in benches]
        for index in range(1, setting.repeat + 1):
            for which in range(len(benches))[:: 1 if index % 2 else -1]:
                measured[which].append(benches[which].repeat(index))
        return _row(setting, benches, warm_ups, measured)


@contextmanager
def _opened(setting: LayoutSetting, pair: str) -> Iterator[_Bench]:
    """Start the processes and nodes of one pair."""
    request = Request.of(PAIRS[pair], total_bytes=setting.total_bytes)
    pool = RankPool(request.pair.target, request)
    cache = pool.cache()
    arguments = {"request": request, "threads": setting.threads}
    with (
        Worker("kvlink.bench.rank_source:RankSources", arguments=arguments) as sources,
        kvlink.Node(cache, name="bench-target", copy_threads=setting.threads) as node,
    ):
        reference = RunReference(sources=sources.call("layouts", timeout_s=_DEADLINE_S), target=cache.layout)
        yield _Bench(setting=setting, request=request, pool=pool, sources=sources, node=node, reference=reference)
        sources.call("close")
        sources.close()


@dataclass(frozen=True, kw_only=True)
class _Bench:
    setting: LayoutSetting
    request: Request
    pool: RankPool
    sources: Worker
    node: kvlink.Node
    reference: RunReference

    def repeat(self, index: int) -> _Repetition:
        request = self.request
        source_table = request.table(request.pair.sources[0], seed=2 * index)
        target_table = request.table(request.pair.target, seed=2 * index + 1)
        runs = self.reference.runs(source_table, target_table, num_tokens=request.num_tokens)
        self.pool.forget()
        before = self.reference.seconds(runs) if index % 2 else None
        ticket = self.sources.call("offer", source_table)
        started = time.perf_counter()
        pull = self.node.pull(
            ticket,
            target_table,
            deadline_s=_DEADLINE_S,
            require=None if self.setting.lane == "auto" else self.setting.lane,
        )
        pull.wait(timeout_s=_DEADLINE_S)
        seconds = time.perf_counter() - started
        self.sources.call("finish", timeout_s=_DEADLINE_S)
        return _Repetition(
            seconds=seconds,
            memcpy_seconds=before if before is not None else self.reference.seconds(runs),
            lane=pull.lane,
            run_bytes=runs.run_bytes,
            runs=len(runs.source_offsets),
            verified=self.pool.holds(request=request, source_table=source_table, target_table=target_table, seed=SEED),
        )


def _row(
    setting: LayoutSetting,
    benches: list[_Bench],
    warm_ups: list[_Repetition],
    measured: list[list[_Repetition]],
) -> LayoutRow:
    request, repetitions = benches[0].request, measured[0]
    moved_gb = request.moved_bytes / _GB
    speeds = [moved_gb / repetition.seconds for repetition in repetitions]
    ratios = [repetition.memcpy_seconds / repetition.seconds for repetition in repetitions]
    beside: list[float] = []
    if setting.against:
        other_gb = benches[1].request.moved_bytes / _GB
        beside = [speed / (other_gb / other.seconds) for speed, other in zip(speeds, measured[1], strict=True)]
    return LayoutRow(
        system="kvlink",
        pair=setting.pair,
        lane="+".join(sorted({repetition.lane for repetition in repetitions})),
        lane_reason=lane_reasons(benches[0].node),
        threads=setting.threads,
        sources=len(request.pair.sources),
        run_bytes=repetitions[0].run_bytes,
        runs=repetitions[0].runs,
        moved_bytes=request.moved_bytes,
        gbps_median=statistics.median(speeds),
        gbps_min=min(speeds),
        gbps_max=max(speeds),
        memcpy_gbps=statistics.median(moved_gb / repetition.memcpy_seconds for repetition in repetitions),
        ratio_to_memcpy=statistics.median(ratios),
        ratio_min=min(ratios),
        ratio_max=max(ratios),
        against=setting.against,
        ratio_to_against=statistics.median(beside) if beside else None,
        ratio_to_against_min=min(beside, default=None),
        ratio_to_against_max=max(beside, default=None),
        verified=all(repetition.verified for repetition in [*warm_ups, *(one for each in measured for one in each)]),
    )
