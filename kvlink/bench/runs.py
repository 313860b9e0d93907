"""The runs that a request copies, one by one, for a memcpy of exactly the same runs in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvlink import _native
from kvlink.bench.ranks import private_bytes
from kvlink.bench.scattered import Bytes, Table, Words
from kvlink.layout import CacheLayout
from kvlink.plan import compile_template, select

__all__ = ["RunReference", "Runs"]


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Runs of one length: number `i` lies at `source_offsets[i]` and goes to `target_offsets[i]`."""

    run_bytes: int
    source_offsets: Words
    target_offsets: Words


@dataclass(kw_only=True)
class RunReference:
    """Two private pools of the sizes of the real ones, and the memcpy of a request's runs between them."""

    sources: Sequence[CacheLayout]
    target: CacheLayout
    _source_bytes: Bytes = field(init=False, repr=False)
    _target_bytes: Bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        shares = select(self.sources, self.target, seed=0)
        self._templates = [compile_template(source, share) for source, share in zip(self.sources, shares, strict=True)]
        self._source_bytes = private_bytes(sum(sum(source.region_bytes) for source in self.sources))
        self._target_bytes = private_bytes(sum(self.target.region_bytes))

    def runs(self, source_table: Table, target_table: Table, *, num_tokens: int) -> Runs:
        """Return all runs of a request in the order of its plan, one source after the other.

        Neighbours that the plan merged are cut to the length of the others: a few of thousands.
        """
        lengths, from_source, to_target = [], [], []
        base = 0
        for layout, template in zip(self.sources, self._templates, strict=True):
            plan = _native.Plan(template, [source_table], [target_table], end_token=num_tokens)
            length, source, target = _expanded(plan.copies(), layout.region_bytes, self.target.region_bytes)
            lengths.append(length)
            from_source.append(source + np.uint64(base))
            to_target.append(target)
            base += sum(layout.region_bytes)
        return _of_one_length(np.concatenate(lengths), np.concatenate(from_source), np.concatenate(to_target))

    def seconds(self, runs: Runs) -> float:
        """Copy `runs` by memcpy on this thread and return how long that took."""
        return _native.memcpy_seconds(
            source=self._source_bytes,
            target=self._target_bytes,
            source_offsets=runs.source_offsets,
            target_offsets=runs.target_offsets,
            run_bytes=runs.run_bytes,
        )


def _expanded(copies: Any, source_regions: Sequence[int], target_regions: Sequence[int]) -> tuple[Words, Words, Words]:
    """Return length, source offset and target offset of each run of some strided copies, regions end to end."""
    source_region, target_region, source, target, run_bytes, inner, outer, *strides = copies.T
    source = source + _starts(source_regions)[source_region]
    target = target + _starts(target_regions)[target_region]
    counts = (inner * outer).astype(np.int64)
    within = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)).astype(np.uint64)
    outer_index, inner_index = np.divmod(within, np.repeat(inner, counts))
    source_inner, target_inner, source_outer, target_outer = (np.repeat(stride, counts) for stride in strides)
    return (
        np.repeat(run_bytes, counts),
        np.repeat(source, counts) + inner_index * source_inner + outer_index * source_outer,
        np.repeat(target, counts) + inner_index * target_inner + outer_index * target_outer,
    )


def _of_one_length(lengths: Words, source: Words, target: Words) -> Runs:
    run_bytes = int(np.gcd.reduce(lengths))
    pieces = (lengths // np.uint64(run_bytes)).astype(np.int64)
    within = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    shift = within.astype(np.uint64) * np.uint64(run_bytes)
    return Runs(
        run_bytes=run_bytes,
        source_offsets=np.repeat(source, pieces) + shift,
        target_offsets=np.repeat(target, pieces) + shift,
    )


def _starts(region_bytes: Sequence[int]) -> Words:
    return np.cumsum([0, *region_bytes[:-1]], dtype=np.uint64)
