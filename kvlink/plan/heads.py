"""Ranges of KV heads, which parts hold and targets want."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvlink.layout.geometry import PartLayout

__all__ = ["HeadRange", "head_ranges", "with_heads"]

HeadRange = tuple[int, int]
"""First head, and one past the last."""


def head_ranges(parts: Iterable[PartLayout]) -> list[HeadRange]:
    """Return the heads of all `parts` as few ranges by rising head, none of which touch."""
    ranges: list[HeadRange] = []
    for start, end in sorted((part.head_start, part.head_start + part.head_count) for part in parts):
        if ranges and start <= ranges[-1][1]:
            ranges[-1] = ranges[-1][0], max(end, ranges[-1][1])
        else:
            ranges.append((start, end))
    return ranges


def with_heads(part: PartLayout, heads: HeadRange) -> PartLayout:
    """Return what `part` has of `heads`, which lie inside it: the same bytes of the same memory."""
    start, end = heads
    if (start, end) == (part.head_start, part.head_start + part.head_count):
        return part
    return msgspec.structs.replace(
        part,
        head_start=start,
        head_count=end - start,
        offset=part.offset + (start - part.head_start) * part.head_stride,
        head_stride=part.head_stride if end - start > 1 else 0,
    )
