"""Who delivers what, where a target draws from several sources: ranks, pipeline stages, replicas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from kvlink.errors import InvalidArgument
from kvlink.layout.geometry import CacheLayout, PartLayout
from kvlink.plan.conversion import Conversions
from kvlink.plan.heads import HeadRange, head_ranges, with_heads
from kvlink.plan.mismatch import check_groups, check_part, refuse_missing

__all__ = ["select"]


def select(
    sources: Sequence[CacheLayout], target: CacheLayout, *, seed: int, converts: Conversions = frozenset()
) -> list[CacheLayout]:
    """Return for each source what it delivers of `target`: a layout of the target's memory with fewer parts and heads.

    Together they have every element of the target exactly once. Where several sources hold the same, `seed` picks
    one of them: targets with successive seeds draw from them in turn, and one target draws all that they share from
    the same one. A source that is not needed gets a layout without parts. All groups keep their places. Elements may
    have another dtype at a source where `converts` has the pair.

    All layouts must have passed ``validate_layout``. Pure, and equal arguments give equal results.

    Raises
    ------
    LayoutMismatch
        If no source holds something that the target holds, or a source has other elements: the message names the
        field, what the source has and what the target has.
    InvalidArgument
        If there is no source.
    """
    if not sources:
        raise InvalidArgument("select takes at least one source")
    for source in sources:
        check_groups(source, target)
    holders = _Holders.of(sources, converts)
    elected: list[list[PartLayout]] = [[] for _ in sources]
    for part in target.parts:
        for source_index, heads in _elected(part, holders.that_hold(part), seed):
            if source_index is None:
                refuse_missing(sources, target, part)
            elected[source_index].append(with_heads(part, heads))
    return [msgspec.structs.replace(target, parts=tuple(parts)) for parts in elected]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """Heads that one source holds without a gap."""

    source_index: int
    heads: HeadRange


@dataclass(frozen=True, slots=True)
class _Holders:
    """The parts of all sources: for each (group, layer, component), by source."""

    parts: dict[tuple[str, str, str], dict[int, list[PartLayout]]]
    converts: Conversions

    @classmethod
    def of(cls, sources: Sequence[CacheLayout], converts: Conversions) -> _Holders:
        parts: dict[tuple[str, str, str], dict[int, list[PartLayout]]] = {}
        for i, source in enumerate(sources):
            for part in source.parts:
                by_source = parts.setdefault((part.group, part.layer, part.component), {})
                by_source.setdefault(i, []).append(part)
        return cls(parts, converts)

    def that_hold(self, wanted: PartLayout) -> list[_Held]:
        """Return who holds heads of what `wanted` is a part of, by rising first head."""
        held = []
        for source_index, parts in self.parts.get((wanted.group, wanted.layer, wanted.component), {}).items():
            for part in parts:
                check_part(part, wanted, converts=self.converts)
            held += [_Held(source_index=source_index, heads=heads) for heads in head_ranges(parts)]
        return sorted(held, key=lambda one: one.heads[0])


def _elected(part: PartLayout, held: list[_Held], seed: int) -> Iterator[tuple[int | None, HeadRange]]:
    """Yield who delivers which heads of `part`, by rising head; ``None``: nobody holds them."""
    first, end = part.head_start, part.head_start + part.head_count
    edges = {first, end} | {edge for one in held for edge in one.heads if first < edge < end}
    starts = sorted(edges)
    elected: int | None = None
    begin = first
    candidates: list[_Held] = []
    upcoming = iter(held)
    following = next(upcoming, None)
    for start in starts[:-1]:
        # A sweep: a source stays a candidate until its range ends, so the work is bounded by edges x sources.
        while following is not None and following.heads[0] <= start:
            candidates.append(following)
            following = next(upcoming, None)
        candidates = [one for one in candidates if one.heads[1] > start]
        of_segment = sorted(one.source_index for one in candidates)
        chosen = of_segment[seed % len(of_segment)] if of_segment else None
        if chosen != elected and start > begin:
            yield elected, (begin, start)
            begin = start
        elected = chosen
    yield elected, (begin, end)
