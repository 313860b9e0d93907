"""Requests as packed bytes, in NumPy alone: what the native plan does, written down a second time.

For each part of the target's layout, in its order: its wanted tokens, of each its heads, of each its
elements. Slow and plain: it serves where there is no compiled part, and as what the native plan is
compared with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvlink.errors import InvalidArgument, NotOffered
from kvlink.layout.geometry import CacheLayout, GroupLayout, PartLayout
from kvlink.plan.mismatch import check_groups, check_part, refuse_missing

__all__ = ["Tables", "Tokens", "gather", "packed_bytes", "scatter", "wanted_tokens"]

Tables = Mapping[str, npt.NDArray[np.int32]]
"""Block tables by group; -1 is a hole."""

Tokens = Mapping[str, npt.NDArray[np.int64]]
"""Tokens by group, rising; where a group has slots, places in its table."""

_Memory = Sequence[npt.NDArray[np.uint8]]


def wanted_tokens(layout: CacheLayout, tables: Tables, *, skip_tokens: int, num_tokens: int) -> Tokens:
    """Return what a target wants: no holes, of a sliding window only what lies in it, of slots all."""
    wanted = {}
    for group in layout.groups:
        table = tables[group.name]
        if group.slots:
            tokens = np.arange(len(table), dtype=np.int64)
        else:
            first = skip_tokens if group.window is None else max(skip_tokens, num_tokens - group.window)
            tokens = np.arange(first, num_tokens, dtype=np.int64)
        wanted[group.name] = tokens[table[tokens // group.block_tokens] >= 0]
    return wanted


def packed_bytes(layout: CacheLayout, tokens: Tokens) -> int:
    """Return how many bytes the tokens of all parts of `layout` are."""
    return sum(len(tokens[part.group]) * part.head_count * part.head_dim * part.element_bytes for part in layout.parts)


def gather(
    source: CacheLayout, memory: _Memory, tables: Tables, *, target: CacheLayout, tokens: Tokens
) -> npt.NDArray[np.uint8]:
    """Return the bytes of `tokens` that the parts of `target` take, out of the source's memory.

    Raises
    ------
    LayoutMismatch
        If the source has other elements, or lacks some.
    NotOffered
        If a token that is wanted lies in a hole, or behind the end, of the source's table.
    """
    check_groups(source, target)
    groups = {group.name: group for group in source.groups}
    pieces = []
    for part in target.parts:
        holders = _holders(source, target, part)
        group = groups[part.group]
        blocks, offsets = _places(group, tables[part.group], tokens[part.group])
        heads = range(part.head_start, part.head_start + part.head_count)
        of_heads = []
        for head in heads:
            holder = holders[head]
            view = _view(holder, group, memory)
            of_heads.append(view[blocks, offsets, head - holder.head_start])
        pieces.append(np.stack(of_heads, axis=1).reshape(-1))
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.uint8)


def scatter(
    target: CacheLayout, memory: _Memory, tables: Tables, *, tokens: Tokens, packed: npt.NDArray[np.uint8]
) -> None:
    """Write what ``gather`` returned into the target's memory."""
    groups = {group.name: group for group in target.groups}
    position = 0
    for part in target.parts:
        group = groups[part.group]
        blocks, offsets = _places(group, tables[part.group], tokens[part.group])
        shape = (len(blocks), part.head_count, part.head_dim, part.element_bytes)
        size = int(np.prod(shape))
        _view(part, group, memory)[blocks, offsets] = packed[position : position + size].reshape(shape)
        position += size
    if position != len(packed):
        raise InvalidArgument(f"scatter: {len(packed)} bytes for parts of {position}")


def _holders(source: CacheLayout, target: CacheLayout, wanted: PartLayout) -> dict[int, PartLayout]:
    """Return which part of the source holds each head of one part of the target."""
    key = (wanted.group, wanted.layer, wanted.component)
    held: dict[int, PartLayout] = {}
    for part in source.parts:
        if (part.group, part.layer, part.component) == key:
            check_part(part, wanted)
            held.update(dict.fromkeys(range(part.head_start, part.head_start + part.head_count), part))
    if not all(head in held for head in range(wanted.head_start, wanted.head_start + wanted.head_count)):
        refuse_missing([source], target, wanted)
    return held


def _places(group: GroupLayout, table: npt.NDArray[np.int32], tokens: npt.NDArray[np.int64]) -> tuple[Any, Any]:
    """Return the block of each token, and its place in it."""
    entries = tokens // group.block_tokens
    if len(entries) and (int(entries[-1]) >= len(table) or (table[entries] < 0).any()):
        raise NotOffered(f"group {group.name}: tokens are wanted that lie in no block of the offer")
    return table[entries], tokens % group.block_tokens


def _view(part: PartLayout, group: GroupLayout, memory: _Memory) -> npt.NDArray[np.uint8]:
    """Return the part's bytes by block, token, head, dim and byte of an element."""
    view: npt.NDArray[np.uint8] = np.lib.stride_tricks.as_strided(
        memory[part.region][part.offset :],
        shape=(group.num_blocks, group.block_tokens, part.head_count, part.head_dim, part.element_bytes),
        strides=(part.block_stride, part.token_stride, part.head_stride, part.dim_stride, 1),
    )
    return view
