"""One node that serves many at once, or reads from many: what is left of the bandwidth of one to one, and for whom.

All processes share one host here, so both sides of each ratio use the same memory and the same
cores; the one-to-one handoff moves as many bytes, and stands next to each repetition in turn.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypedDict

import numpy as np

from kvlink.bench.scattered import Geometry, Table, permutation
from kvlink.errors import InvalidArgument
from kvlink.testing import Worker

__all__ = ["FanRow", "FanSetting", "measure_fan"]

_GB = 1e9
_CALL_S = 90.0
# So that all targets have their call before the first begins.
_HEAD_START_S = 0.03

Shape = Literal["fanout", "incast"]
_Times = list[tuple[float, float]]


class FanRow(TypedDict):
    """What is reported of one number of peers."""

    system: str
    shape: str
    lane: str
    peers: int
    block_bytes: int
    total_bytes: int
    threads: int
    repeat: int
    gbps: float
    gbps_one_to_one: float
    ratio_to_one_to_one: float
    slowest_to_mean: float
    verified: bool


@dataclass(frozen=True, kw_only=True)
class FanSetting:
    """What is measured: one row.

    Attributes
    ----------
    shape
        ``"fanout"``: one source, many targets; ``"incast"``: many sources, one target.
    peers
        How many.
    total_bytes
        Bytes moved in one repetition, by all of them together.
    """

    shape: Shape
    peers: int
    block_bytes: int
    total_bytes: int
    lane: str
    threads: int
    repeat: int

    def __post_init__(self) -> None:
        """Refuse what leaves a peer without a block."""
        if self.block_bytes % 256 or self.total_bytes // self.peers < self.block_bytes:
            raise InvalidArgument(
                f"{self.total_bytes} bytes for {self.peers} peers in blocks of {self.block_bytes}: give each one of "
                "a multiple of 256 bytes (K and V of 16 tokens) at least"
            )

    @property
    def share(self) -> Geometry:
        """What one peer moves."""
        blocks = self.total_bytes // self.block_bytes // self.peers
        return Geometry(block_bytes=self.block_bytes // 2, total_bytes=blocks * self.block_bytes)

    @property
    def whole(self) -> Geometry:
        """What all peers move."""
        return Geometry(block_bytes=self.block_bytes // 2, total_bytes=self.share.moved_bytes * self.peers)


@dataclass(kw_only=True)
class _Measured:
    gbps: list[float] = field(default_factory=list)
    one_to_one: list[float] = field(default_factory=list)
    slowest: list[float] = field(default_factory=list)
    verified: bool = True


def measure_fan(setting: FanSetting) -> FanRow:
    """Start the processes, run ``setting.repeat`` repetitions, and return the row.

    Raises
    ------
    KvlinkError
        Whatever a handoff may end with.
    """
    done = _Measured()
    with contextlib.ExitStack() as stack:
        fleet = _Fleet(setting, stack)
        fleet.warm_up()
        for index in range(1, setting.repeat + 1):
            steps = [fleet.many, fleet.one]
            for step in steps if index % 2 else reversed(steps):
                step(index, done)
        lane = fleet.close()
    return FanRow(
        system="kvlink",
        shape=setting.shape,
        lane=lane,
        peers=setting.peers,
        block_bytes=setting.block_bytes,
        total_bytes=setting.whole.moved_bytes,
        threads=setting.threads,
        repeat=setting.repeat,
        gbps=statistics.median(done.gbps),
        gbps_one_to_one=statistics.median(done.one_to_one),
        ratio_to_one_to_one=statistics.median(many / one for many, one in zip(done.gbps, done.one_to_one, strict=True)),
        slowest_to_mean=statistics.median(done.slowest),
        verified=done.verified,
    )


class _Fleet:
    """The hub, its many peers, and one more peer that is as large as all of them."""

    def __init__(self, setting: FanSetting, stack: contextlib.ExitStack) -> None:
        self._setting = setting
        self._fans_out = setting.shape == "fanout"
        threads, many = setting.threads, range(setting.peers)

        def source(geometry: Geometry, seed: int) -> Worker:
            arguments = {"geometry": geometry, "threads": threads, "seed": seed}
            return stack.enter_context(Worker("kvlink.bench.fan_nodes:FanSource", arguments=arguments))

        def target(geometry: Geometry) -> Worker:
            arguments = {"geometry": geometry, "threads": threads}
            return stack.enter_context(Worker("kvlink.bench.fan_nodes:FanTarget", arguments=arguments))

        if self._fans_out:
            self._sources = [source(setting.whole, 1)]
            self._targets = [target(setting.share) for _ in many]
            self._large_source, self._large_target = self._sources[0], target(setting.whole)
        else:
            self._sources = [source(setting.share, 1 + number) for number in many]
            self._targets = [target(setting.whole)]
            self._large_source, self._large_target = source(setting.whole, 0), self._targets[0]
        self._large_seed = 1 if self._fans_out else 0

    def warm_up(self) -> None:
        """Connect, and let each target read all blocks of its sources once, so that every page of them is mapped."""
        count = self._setting.peers
        pieces = np.split(np.arange(self._source_geometry.pool_blocks, dtype=np.int32), self._pieces)
        targets = self._tables(0)[1]
        for step in range(self._pieces):
            self._move([pieces[(step + number) % self._pieces] for number in range(count)], targets)
        whole = self._setting.whole
        for half in np.split(np.arange(whole.pool_blocks, dtype=np.int32), 2):
            self._move_large(half, permutation(whole, seed=0))

    def many(self, index: int, done: _Measured) -> None:
        """Let all peers move their shares at once."""
        setting = self._setting
        sources, targets = self._tables(index)
        times = self._move(sources, targets)
        rates = [setting.share.moved_bytes / (ended - began) for began, ended in times]
        done.gbps.append(setting.whole.moved_bytes / _GB / _span(times))
        done.slowest.append(min(rates) / statistics.mean(rates))
        for number, (source_table, target_table) in enumerate(zip(sources, targets, strict=True)):
            done.verified &= self._targets[number if self._fans_out else 0].call(
                "holds",
                source=self._source_geometry,
                source_table=source_table,
                target_table=target_table,
                seed=1 if self._fans_out else 1 + number,
                timeout_s=_CALL_S,
            )

    def one(self, index: int, done: _Measured) -> None:
        """Move as much from one to one."""
        geometry = self._setting.whole
        source_table, target_table = (permutation(geometry, seed=100 * index + 50 + side) for side in (0, 1))
        times = self._move_large(source_table, target_table)
        done.one_to_one.append(geometry.moved_bytes / _GB / _span(times))
        done.verified &= self._large_target.call(
            "holds",
            source=geometry,
            source_table=source_table,
            target_table=target_table,
            seed=self._large_seed,
            timeout_s=_CALL_S,
        )

    def close(self) -> str:
        """Stop all nodes; return how the bytes came."""
        lane: str = self._targets[0].call("lane")
        for worker in {*self._sources, *self._targets, self._large_source, self._large_target}:
            worker.call("close")
            worker.close()
        return lane

    @property
    def _source_geometry(self) -> Geometry:
        return self._setting.whole if self._fans_out else self._setting.share

    @property
    def _pieces(self) -> int:
        """Shares that the pool of a source has."""
        return self._source_geometry.pool_blocks // self._setting.share.entries

    def _tables(self, index: int) -> tuple[list[Table], list[Table]]:
        """Return the source tables and the target tables of one repetition."""
        setting, count = self._setting, self._setting.peers
        whole = [permutation(setting.whole, seed=100 * index + side) for side in (0, 1)]
        shares = [
            [permutation(setting.share, seed=100 * index + 2 + 2 * number + side) for number in range(count)]
            for side in (0, 1)
        ]
        if self._fans_out:
            return _cut(whole[0], count), shares[1]
        return shares[0], _cut(whole[1], count)

    def _move(self, sources: Sequence[Table], targets: Sequence[Table]) -> _Times:
        if self._fans_out:
            tickets = self._sources[0].call("offer", sources, timeout_s=_CALL_S)
        else:
            tickets = [one.call("offer", [table])[0] for one, table in zip(self._sources, sources, strict=True)]
        times = self._pull(self._targets, tickets, targets)
        for one in self._sources:
            one.call("finish", timeout_s=_CALL_S)
        return times

    def _move_large(self, source_table: Table, target_table: Table) -> _Times:
        tickets = self._large_source.call("offer", [source_table])
        times = self._pull([self._large_target], tickets, [target_table])
        self._large_source.call("finish", timeout_s=_CALL_S)
        return times

    def _pull(self, targets: Sequence[Worker], tickets: Sequence[object], tables: Sequence[Table]) -> _Times:
        lane = None if self._setting.lane == "auto" else self._setting.lane
        for target in targets:
            target.call("forget", timeout_s=_CALL_S)
        begin_at = time.monotonic() + _HEAD_START_S
        each = len(tickets) // len(targets)
        for number, target in enumerate(targets):
            mine = slice(number * each, (number + 1) * each)
            target.start("pull", tickets[mine], tables[mine], begin_at=begin_at, lane=lane)
        return [times for target in targets for times in target.result(timeout_s=_CALL_S)]


def _cut(table: Table, count: int) -> list[Table]:
    each = len(table) // count
    return [table[number * each : (number + 1) * each] for number in range(count)]


def _span(times: _Times) -> float:
    return max(ended for _, ended in times) - min(began for began, _ in times)
