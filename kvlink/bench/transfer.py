"""Move scattered blocks from one process to another, by one system and the next in turn, again and again.

A repetition of kvlink is timed from `Node.pull` until the source has confirmed it: planning, claiming,
copying and confirming all count. The limit is one thread of the C library's memcpy over the same number
of equally scattered blocks. All systems move the blocks of one request before the next request begins,
each time in another order, so that a slower moment of the machine meets them all.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TypedDict

from kvlink.bench.systems import KvlinkSystem, MemcpySystem, Moved, Setting, System, request_tables
from kvlink.errors import KvlinkError

__all__ = ["Row", "Setting", "measure", "measure_systems"]

_GB = 1e9

Start = Callable[[Setting], System]


class Row(TypedDict):
    """What is reported of one system, block size and lane.

    ``ratios`` has, for each other system, the median of the paired ratios: above 1 is faster than that one.
    """

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
    post_us_median: float | None
    cpu_s_per_gb_source: float
    cpu_s_per_gb_target: float
    memcpy_gbps: float
    ratio_to_memcpy: float
    ratios: dict[str, float]
    verified: bool


def measure(setting: Setting) -> Row:
    """Measure kvlink next to memcpy and return its row.

    Raises
    ------
    LaneUnavailable
        If the lane that ``setting.lane`` names cannot be used between the two processes.
    KvlinkError
        Whatever a handoff may end with.
    """
    return measure_systems(setting, {"kvlink": KvlinkSystem, "memcpy": MemcpySystem})[0]


def measure_systems(
    setting: Setting, starts: Mapping[str, Start], *, on_failure: Callable[[str, KvlinkError], None] | None = None
) -> list[Row]:
    """Run one warm-up and ``setting.repeat`` repetitions of every system, in turn, and return a row a system.

    One of them must be memcpy. With `on_failure` a system of others that fails is told to it and has no row.

    Raises
    ------
    KvlinkError
        Whatever a handoff may end with, and without `on_failure` any other system.
    """
    moved: dict[str, list[Moved]] = {name: [] for name in starts}
    systems: dict[str, System] = {}

    def failed(name: str, error: KvlinkError) -> None:
        if name == "kvlink" or on_failure is None:
            raise error
        on_failure(name, error)
        systems.pop(name, None)
        del moved[name]

    with ExitStack() as stack:
        for name, start in starts.items():
            try:
                systems[name] = start(setting)
            except KvlinkError as error:
                failed(name, error)
            else:
                stack.callback(systems[name].close)
        # The first repetition connects and maps, and is not counted: that happens once a peer.
        for index in range(setting.repeat + 1):
            tables = request_tables(setting.geometry, index)
            order = list(systems)
            shift = index % len(order)
            for name in order[shift:] + order[:shift]:
                try:
                    repetition = systems[name].move(tables)
                except KvlinkError as error:
                    failed(name, error)
                    continue
                if index:
                    moved[name].append(repetition)
        return [_row(setting, system, moved) for system in systems.values()]


def _row(setting: Setting, system: System, moved: dict[str, list[Moved]]) -> Row:
    geometry = setting.geometry
    moved_gb = geometry.moved_bytes / _GB
    own = moved[system.name]
    speeds = [moved_gb / repetition.seconds for repetition in own]
    posts = [repetition.post_s * 1e6 for repetition in own if repetition.post_s is not None]
    ratios = {
        name: statistics.median(its.seconds / mine.seconds for its, mine in zip(theirs, own, strict=True))
        for name, theirs in moved.items()
        if name != system.name
    }
    return Row(
        system=system.name,
        lane="+".join(sorted({repetition.lane for repetition in own})),
        lane_reason=system.reason(),
        op=system.op,
        memory=system.memory,
        threads=setting.threads if system.name == "kvlink" else 1,
        block_bytes=geometry.block_bytes,
        blocks=geometry.runs,
        gbps_median=statistics.median(speeds),
        gbps_min=min(speeds),
        gbps_max=max(speeds),
        post_us_median=statistics.median(posts) if posts else None,
        cpu_s_per_gb_source=statistics.median(repetition.cpu_source_s / moved_gb for repetition in own),
        cpu_s_per_gb_target=statistics.median(repetition.cpu_target_s / moved_gb for repetition in own),
        memcpy_gbps=statistics.median(moved_gb / repetition.seconds for repetition in moved["memcpy"]),
        ratio_to_memcpy=ratios.get("memcpy", 1.0),
        ratios=ratios,
        verified=all(repetition.verified for repetition in own),
    )
