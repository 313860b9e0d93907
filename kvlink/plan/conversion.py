"""Elements that arrive in another dtype than the target keeps: what may be asked for, and what that means in bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from kvlink.errors import ConfigError
from kvlink.layout.geometry import CacheLayout, PartLayout

if TYPE_CHECKING:
    from kvlink._native import Conversion

__all__ = ["Conversions", "as_delivered", "check_conversions", "compile_conversion", "conversions_of"]

Conversions = frozenset[tuple[str, str]]
"""Pairs of dtypes: what a source may have, and what the target then keeps."""

ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
POSSIBLE: Conversions = frozenset((one, other) for one in ELEMENT_BYTES for other in ELEMENT_BYTES if one != other)

# Parts of a scratch block begin where vectors and lines of the cache do.
_ALIGNMENT = 64

_PartKey = tuple[str, str, str]


def spelled(pair: tuple[str, str]) -> str:
    """Return the pair as users write it."""
    return "->".join(pair)


def check_conversions(convert: Iterable[str]) -> Conversions:
    """Return the pairs that ``Node(convert=...)`` names.

    Raises
    ------
    ConfigError
        If one is not possible; the message lists those that are.
    """
    possible = {spelled(pair): pair for pair in POSSIBLE}
    listed = f"choose from {', '.join(sorted(possible))}"
    if isinstance(convert, str) or not isinstance(convert, Iterable):
        raise ConfigError(f"convert is a sequence such as ('float32->bfloat16',), not {convert!r}; {listed}")
    pairs = set()
    for asked in convert:
        if asked not in possible:
            raise ConfigError(f"convert: {asked!r} is not possible; {listed}")
        pairs.add(possible[asked])
    return frozenset(pairs)


def may_convert(held: PartLayout, wanted: PartLayout, converts: Conversions) -> bool:
    """Return whether the target has asked for what makes one part of the other. Sizes come from a peer, too."""
    return (held.dtype, wanted.dtype) in converts and all(
        part.element_bytes == ELEMENT_BYTES[part.dtype] for part in (held, wanted)
    )


def as_delivered(source: CacheLayout, share: CacheLayout) -> CacheLayout:
    """Return where `source` delivers the parts of `share`, which are parts of the target's own memory.

    That is `share` itself, but for parts of another dtype: those lie in scratch memory, one more region behind the
    target's own, in the source's dtype and otherwise as in the target. It has every block of the target, block after
    block, so that those of one request lie together.
    """
    held = {_key(part): part for part in source.parts}
    converted = [part for part in share.parts if held[_key(part)].dtype != part.dtype]
    if not converted:
        return share
    within: dict[int, int] = {}  # by the part's place in the share: where it begins in its block
    block_bytes: Counter[str] = Counter()
    num_blocks = {group.name: group.num_blocks for group in share.groups}
    block_tokens = {group.name: group.block_tokens for group in share.groups}
    for index, part in enumerate(share.parts):
        if (of_source := held[_key(part)]).dtype != part.dtype:
            within[index] = block_bytes[part.group]
            elements = block_tokens[part.group] * part.head_count * part.head_dim
            block_bytes[part.group] += _aligned(elements * of_source.element_bytes)
    begin, scratch_bytes = {}, 0
    for group, size in block_bytes.items():
        begin[group] = scratch_bytes
        scratch_bytes += size * num_blocks[group]
    parts = [
        part
        if index not in within
        else msgspec.structs.replace(
            _packed(part, held[_key(part)], block_tokens[part.group]),
            region=len(share.region_bytes),
            offset=begin[part.group] + within[index],
            block_stride=block_bytes[part.group],
        )
        for index, part in enumerate(share.parts)
    ]
    return msgspec.structs.replace(share, parts=tuple(parts), region_bytes=(*share.region_bytes, scratch_bytes))


def conversions_of(delivered: CacheLayout, share: CacheLayout) -> Conversions:
    """Return the pairs of dtypes that differ between the two."""
    return frozenset((arriving.dtype, part.dtype) for arriving, part in _converted(delivered, share))


def compile_conversion(delivered: CacheLayout, share: CacheLayout) -> Conversion | None:
    """Return what makes `share` of what ``as_delivered`` has laid out; ``None`` where nothing is converted."""
    pairs = sorted(conversions_of(delivered, share))
    if not pairs:
        return None
    from kvlink._native import Conversion, Template

    layers = tuple(dict.fromkeys(part.layer for part in share.parts))
    groups = [group.name for group in share.groups]
    scratch_bytes = delivered.region_bytes[-1]
    ops = []
    # Longer elements first: a stream that is cut anywhere at a multiple of the longest is cut between elements.
    for arriving, part in sorted(_converted(delivered, share), key=lambda two: -two[1].element_bytes):
        what = (groups.index(part.group), layers.index(part.layer), 0, part.head_start, part.head_count)
        # In units of the target's elements, so that both sides go on by the same steps.
        offsets = (arriving.offset, arriving.block_stride, arriving.token_stride, arriving.head_stride)
        counted = [one // arriving.element_bytes * part.element_bytes for one in (*offsets, arriving.dim_stride)]
        own = (part.region, part.offset, part.block_stride, part.token_stride, part.head_stride, part.dim_stride)
        kind = pairs.index((arriving.dtype, part.dtype))
        ops.append(((*what, part.head_dim, part.element_bytes), (kind, *counted), own))
    numbers = [(group.block_tokens, group.block_tokens, group.num_blocks, group.num_blocks) for group in share.groups]
    template = Template(
        ops=ops,
        groups=[(name, (i, i, *numbers[i], 0)) for i, name in enumerate(groups)],
        layers=list(layers),
        source_region_bytes=[scratch_bytes // ELEMENT_BYTES[old] * ELEMENT_BYTES[new] for old, new in pairs],
        target_region_bytes=list(share.region_bytes),
    )
    return Conversion(template=template, pairs=pairs, scratch_bytes=scratch_bytes)


def _key(part: PartLayout) -> _PartKey:
    # A source has one dtype for all heads of a component: its layout has been checked for that.
    return part.group, part.layer, part.component


def _converted(delivered: CacheLayout, share: CacheLayout) -> list[tuple[PartLayout, PartLayout]]:
    both = zip(delivered.parts, share.parts, strict=True)
    return [(arriving, part) for arriving, part in both if arriving.dtype != part.dtype]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _packed(part: PartLayout, held: PartLayout, block_tokens: int) -> PartLayout:
    """Return `part` in the dtype of `held` without gaps inside a block, its axes in the order that they have."""
    axes = (
        (part.token_stride, block_tokens, "token_stride"),
        (part.head_stride, part.head_count, "head_stride"),
        (part.dim_stride, part.head_dim, "dim_stride"),
    )
    strides = {name: 0 for _, _, name in axes}
    step = held.element_bytes
    for _, count, name in sorted(axis for axis in axes if axis[1] > 1):
        strides[name] = step
        step *= count
    return msgspec.structs.replace(part, dtype=held.dtype, element_bytes=held.element_bytes, **strides)
