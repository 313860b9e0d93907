"""Checking a layout: one that a peer sent is hostile until this has passed."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvlink.errors import InvalidArgument
from kvlink.layout.disjoint import Lattice, find_overlap
from kvlink.layout.geometry import CacheLayout, GroupLayout, PartLayout

__all__ = ["validate_layout"]


def validate_layout(layout: CacheLayout) -> None:
    """Check that every coordinate has bytes of its own, inside its region.

    Groups of one block pool may share bytes, where a block of one lies in the block of the same number of another.

    Raises
    ------
    InvalidArgument
        For numbers out of their bounds, parts beyond their region, parts or blocks that share bytes, two parts
        for the same heads, block pools of unequal groups, and names that are unknown or there twice.
    """
    try:
        msgspec.convert(msgspec.to_builtins(layout), CacheLayout)
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidArgument(f"the layout is malformed: {error}") from error
    groups = {group.name: group for group in layout.groups}
    if len(groups) != len(layout.groups):
        raise InvalidArgument("the layout has two groups of one name")
    _check_groups(layout.groups)
    lattices: dict[int, list[Lattice]] = {}
    for part in layout.parts:
        lattices.setdefault(part.region, []).append(_checked_lattice(part, groups, layout.region_bytes))
    _refuse_shared_heads(layout.parts)
    for in_region in lattices.values():
        found = find_overlap(in_region)
        if found is not None:
            left, right = found
            where = " of different blocks" if left.block_pool and left.block_pool == right.block_pool else ""
            raise InvalidArgument(f"{left.name} and {right.name} share bytes{where}")


def _check_groups(groups: Sequence[GroupLayout]) -> None:
    pools: dict[str, GroupLayout] = {}
    for group in groups:
        if group.slots and (group.block_tokens, group.window) != (1, None):
            raise InvalidArgument(f"group {group.name} has slots of state, which have neither tokens nor a window")
        if group.block_pool is None:
            continue
        first = pools.setdefault(group.block_pool, group)
        if first.num_blocks != group.num_blocks:
            raise InvalidArgument(
                f"groups {first.name} and {group.name} share block pool {group.block_pool}, of {first.num_blocks} "
                f"blocks for one and {group.num_blocks} for the other"
            )


def _checked_lattice(part: PartLayout, groups: dict[str, GroupLayout], region_bytes: Sequence[int]) -> Lattice:
    group = groups.get(part.group)
    if group is None:
        raise InvalidArgument(f"{part.label}: there is no such group")
    if (part.component == "state") != group.slots:
        raise InvalidArgument(f"{part.label}: state is what slots hold, and slots hold nothing else")
    if part.head_start + part.head_count > part.total_kv_heads:
        raise InvalidArgument(f"{part.label}: there are {part.total_kv_heads} heads in all")
    if part.region >= len(region_bytes):
        raise InvalidArgument(f"{part.label}: region {part.region} of {len(region_bytes)} regions")
    axes = (
        (part.block_stride, group.num_blocks, "block"),
        (part.token_stride, group.block_tokens, "token"),
        (part.head_stride, part.head_count, "head"),
        (part.dim_stride, part.head_dim, "dim"),
    )
    innermost_first = sorted(axis for axis in axes if axis[1] > 1)
    # Each axis must step over all that lies inside, or two coordinates share bytes.
    span = part.element_bytes
    for stride, count, name in innermost_first:
        if stride < span:
            raise InvalidArgument(
                f"{part.label}: its {name}s share bytes: they are {stride} bytes apart and {span} bytes long"
            )
        span += stride * (count - 1)
    if part.offset + span > region_bytes[part.region]:
        raise InvalidArgument(
            f"{part.label}: ends at byte {part.offset + span} of a region of {region_bytes[part.region]}"
        )
    return Lattice(
        part.label,
        part.offset,
        tuple((stride, count) for stride, count, _ in reversed(innermost_first)),
        part.element_bytes,
        block_pool=group.block_pool,
        group=group.name,
        blocks=(part.block_stride, group.num_blocks),
    )


def _refuse_shared_heads(parts: Sequence[PartLayout]) -> None:
    """Two parts for one head would leave open which of them holds the data."""
    by_component: dict[tuple[str, str, str], list[PartLayout]] = {}
    for part in parts:
        by_component.setdefault((part.group, part.layer, part.component), []).append(part)
    for pieces in by_component.values():
        pieces.sort(key=lambda part: part.head_start)
        for left, right in zip(pieces, pieces[1:], strict=False):
            if right.head_start < left.head_start + left.head_count:
                raise InvalidArgument(f"{left.label} and {right.label} both hold head {right.head_start}")
            if (left.total_kv_heads, left.head_dim, left.dtype, left.element_bytes) != (
                right.total_kv_heads,
                right.head_dim,
                right.dtype,
                right.element_bytes,
            ):
                raise InvalidArgument(f"{left.label} and {right.label} differ in more than their heads")
