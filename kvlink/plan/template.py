"""The copies between one source and what a target takes from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from kvlink.layout.geometry import CacheLayout, Component, PartLayout
from kvlink.plan.mismatch import check_groups, check_part, refuse_missing

if TYPE_CHECKING:
    from kvlink._native import Template

__all__ = ["compile_template"]

_COMPONENTS: tuple[str, ...] = get_args(Component)

_Side = tuple[int, int, int, int, int, int]
_Op = tuple[tuple[int, int, int, int, int, int, int], _Side, _Side]
_Group = tuple[str, tuple[int, ...]]


def compile_template(source: CacheLayout, target: CacheLayout) -> Template:
    """Return the copies inside one block pair, for all parts of `target`: a whole cache, or one that ``select`` made.

    Both layouts must have passed ``validate_layout``. Axis orders, fused or separate K and V, block sizes and the
    splits of layers into tensors may differ. The source may hold more groups, layers and heads than the target, and
    the target may have no parts: then no bytes move. Both peers compile the same from the same two layouts.

    Raises
    ------
    LayoutMismatch
        If the source lacks something that the target holds, or the two are caches of different models. The message
        names the field and both values.
    """
    from kvlink._native import Template  # pairing without the extension needs the rest of this stage

    check_groups(source, target)
    layers = tuple(dict.fromkeys(part.layer for part in target.parts))
    return Template(
        ops=_Compiler(source, target, layers).ops(),
        groups=[_paired_group(source, target, index) for index in range(len(target.groups))],
        layers=list(layers),
        source_region_bytes=list(source.region_bytes),
        target_region_bytes=list(target.region_bytes),
    )


def _paired_group(source: CacheLayout, target: CacheLayout, target_index: int) -> _Group:
    group = target.groups[target_index]
    # A group that the source lacks has no ops: any position and size of its blocks there will do.
    source_index, source_group = 0, group
    for index, other in enumerate(source.groups):
        if other.name == group.name:
            source_index, source_group = index, other
    numbers: tuple[int, ...] = (
        source_index,
        target_index,
        source_group.block_tokens,
        group.block_tokens,
        source_group.num_blocks,
        group.num_blocks,
        group.window or 0,
    )
    if group.slots or group.block_pool is not None:
        numbers = (*numbers, int(group.slots), _first_of_pool(target, target_index))
    return group.name, numbers


def _first_of_pool(target: CacheLayout, target_index: int) -> int:
    """Return the position of the first group that draws its blocks from the same pool; its own if there is none."""
    pool = target.groups[target_index].block_pool
    return target_index if pool is None else [group.block_pool for group in target.groups].index(pool)


def _side(part: PartLayout, first_head: int) -> _Side:
    offset = part.offset + (first_head - part.head_start) * part.head_stride
    return part.region, offset, part.block_stride, part.token_stride, part.head_stride, part.dim_stride


@dataclass(frozen=True, slots=True)
class _Compiler:
    """Pairs each part of the target with the parts of the source that hold its heads."""

    source: CacheLayout
    target: CacheLayout
    layers: tuple[str, ...]

    def ops(self) -> list[_Op]:
        """Return the ops in the order of the target's parts, then of heads."""
        found: dict[tuple[str, str, str], list[PartLayout]] = {}
        for part in self.source.parts:
            found.setdefault((part.group, part.layer, part.component), []).append(part)
        for holders in found.values():
            holders.sort(key=lambda holder: holder.head_start)
        layer_indices = {name: i for i, name in enumerate(self.layers)}
        group_indices = {group.name: i for i, group in enumerate(self.target.groups)}
        ops: list[_Op] = []
        for part in self.target.parts:
            holders = found.get((part.group, part.layer, part.component), [])
            what = (group_indices[part.group], layer_indices[part.layer], _COMPONENTS.index(part.component))
            for holder, first, count in self._shared_heads(part, holders):
                numbers = (*what, first, count, part.head_dim, part.element_bytes)
                ops.append((numbers, _side(holder, first), _side(part, first)))
        return ops

    def _shared_heads(self, part: PartLayout, holders: list[PartLayout]) -> list[tuple[PartLayout, int, int]]:
        """Return which part of the source holds which heads of `part`: (holder, first head, count) by rising head."""
        shared = []
        head = part.head_start
        end = part.head_start + part.head_count
        for holder in holders:
            check_part(holder, part)
            stop = min(end, holder.head_start + holder.head_count)
            if holder.head_start <= head < stop:
                shared.append((holder, head, stop - head))
                head = stop
        if head < end:
            refuse_missing([self.source], self.target, part)
        return shared
