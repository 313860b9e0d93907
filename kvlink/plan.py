"""Stage 2: the copies between two layouts, compiled once per pair of peers.

Both peers compile the same template from the same two layouts. Pairing is by name and global index (group, layer,
component, head), never by position. A request adds only its block tables; native code pairs them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn, get_args

from kvlink._native import Template
from kvlink.errors import LayoutMismatch
from kvlink.layout.geometry import CacheLayout, Component, GroupLayout, PartLayout

__all__ = ["compile_template"]

_COMPONENTS: tuple[str, ...] = get_args(Component)

_Side = tuple[int, int, int, int, int, int]
_Op = tuple[tuple[int, int, int, int, int, int], _Side, _Side]
_Group = tuple[str, tuple[int, int, int, int, int, int, int]]


def compile_template(source: CacheLayout, target: CacheLayout) -> Template:
    """Return the copies inside one block pair, for all that the target holds.

    Both layouts must have passed ``validate_layout``. Axis orders, fused or separate K and V, block sizes and the
    splits of layers into tensors may differ. The source may hold more layers and heads than the target.

    Raises
    ------
    LayoutMismatch
        If the source lacks something that the target holds, or the two are caches of different models. The message
        names the field and both values.
    """
    _check_models(source, target)
    layers = tuple(dict.fromkeys(part.layer for part in target.parts))
    return Template(
        ops=_Compiler(source, target, layers).ops(),
        groups=_paired_groups(source, target),
        layers=list(layers),
        source_region_bytes=list(source.region_bytes),
        target_region_bytes=list(target.region_bytes),
    )


def _refuse(field: str, source: object, target: object) -> NoReturn:
    raise LayoutMismatch(f"pair two caches: {field} differs: the source has {source}, the target has {target}")


def _listed(names: Iterable[str]) -> str:
    """Name a few of many, so that a message stays short."""
    ordered = sorted(names)
    if not ordered:
        return "nothing"
    rest = f" and {len(ordered) - 6} more" if len(ordered) > 6 else ""
    return ", ".join(ordered[:6]) + rest


def _check_models(source: CacheLayout, target: CacheLayout) -> None:
    if None not in (source.model, target.model) and source.model != target.model:
        _refuse("model", source.model, target.model)
    source_groups = {group.name for group in source.groups}
    target_groups = {group.name for group in target.groups}
    if source_groups != target_groups:
        _refuse("groups", _listed(source_groups), _listed(target_groups))
    for group in target.groups:
        window = source.group(group.name).window
        if window != group.window:
            _refuse(f"window of group {group.name}", window, group.window)


def _paired_groups(source: CacheLayout, target: CacheLayout) -> list[_Group]:
    return [
        _paired_group(target_index, target_group, source_index, source_group)
        for target_index, target_group in enumerate(target.groups)
        for source_index, source_group in enumerate(source.groups)
        if source_group.name == target_group.name
    ]


def _paired_group(target_index: int, target: GroupLayout, source_index: int, source: GroupLayout) -> _Group:
    return (
        target.name,
        (
            source_index,
            target_index,
            source.block_tokens,
            target.block_tokens,
            source.num_blocks,
            target.num_blocks,
            target.window or 0,
        ),
    )


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
        layer_indices = {name: i for i, name in enumerate(self.layers)}
        group_indices = {group.name: i for i, group in enumerate(self.target.groups)}
        ops: list[_Op] = []
        for part in self.target.parts:
            holders = found.get((part.group, part.layer, part.component))
            if holders is None:
                self._refuse_missing(part)
            what = (group_indices[part.group], layer_indices[part.layer], _COMPONENTS.index(part.component))
            for holder, first, count in _shared_heads(part, holders):
                numbers = (*what, count, part.head_dim, part.element_bytes)
                ops.append((numbers, _side(holder, first), _side(part, first)))
        return ops

    def _refuse_missing(self, part: PartLayout) -> NoReturn:
        where = f"group {part.group}"
        source_layers = {p.layer for p in self.source.parts if p.group == part.group}
        target_layers = {p.layer for p in self.target.parts if p.group == part.group}
        if part.layer not in source_layers:
            _refuse(f"layers of {where}", _listed(source_layers), _listed(target_layers))
        components = [
            {p.component for p in layout.parts if (p.group, p.layer) == (part.group, part.layer)}
            for layout in (self.source, self.target)
        ]
        _refuse(f"components of {part.layer} in {where}", _listed(components[0]), _listed(components[1]))


def _shared_heads(part: PartLayout, holders: list[PartLayout]) -> list[tuple[PartLayout, int, int]]:
    """Return which part of the source holds which heads of `part`: (holder, first head, count) by rising head."""
    where = f"{part.component} of {part.layer} in group {part.group}"
    shared = []
    head = part.head_start
    end = part.head_start + part.head_count
    for holder in sorted(holders, key=lambda holder: holder.head_start):
        for field in ("total_kv_heads", "head_dim", "dtype", "element_bytes"):
            if getattr(holder, field) != getattr(part, field):
                _refuse(f"{field} of {where}", getattr(holder, field), getattr(part, field))
        stop = min(end, holder.head_start + holder.head_count)
        if holder.head_start <= head < stop:
            shared.append((holder, head, stop - head))
            head = stop
    if head < end:
        held = ", ".join(_heads(holder) for holder in holders)
        _refuse(f"heads of {where}", held, _heads(part))
    return shared


def _heads(part: PartLayout) -> str:
    return f"{part.head_start}..{part.head_start + part.head_count - 1} of {part.total_kv_heads}"
