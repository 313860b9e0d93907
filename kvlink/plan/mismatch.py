"""Why two caches cannot be paired: the refusals of a connection, each with its field and both values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NoReturn, get_args

from kvlink.errors import LayoutMismatch
from kvlink.layout.geometry import CacheLayout, PartLayout
from kvlink.plan.conversion import POSSIBLE, Conversions, may_convert, spelled
from kvlink.plan.heads import head_ranges

__all__ = ["Field", "check_groups", "check_part", "refuse_missing"]

_PartField = Literal["total_kv_heads", "head_dim", "dtype", "element_bytes"]

Field = Literal["model", "groups", "slots", "window", "layers", "components", "heads", _PartField]
"""What two caches may be refused for. All else says only where elements lie, and may differ."""

_PART_FIELDS: tuple[_PartField, ...] = get_args(_PartField)
_MOST_NAMES = 6
_NO_CONVERSION = "; kvlink does not convert such elements, so both engines must keep their cache in one dtype"


def check_groups(source: CacheLayout, target: CacheLayout) -> None:
    """Check what two caches say about themselves and about groups of the same name.

    Raises
    ------
    LayoutMismatch
        If they are of different models, or a group has another window or another kind of blocks.
    """
    if None not in (source.model, target.model) and source.model != target.model:
        _refuse("model", "", source.model, target.model)
    of_source = {group.name: group for group in source.groups}
    for group in target.groups:
        other = of_source.get(group.name, group)
        where = f" of group {group.name}"
        if other.slots != group.slots:
            _refuse("slots", where, _kind(other.slots), _kind(group.slots))
        if other.window != group.window:
            _refuse("window", where, other.window, group.window)


def check_part(held: PartLayout, wanted: PartLayout, *, converts: Conversions = frozenset()) -> None:
    """Check that two parts of one (group, layer, component) have the same elements, or such as are to be converted.

    Raises
    ------
    LayoutMismatch
        If they have not.
    """
    converted = may_convert(held, wanted, converts)
    for field in _PART_FIELDS:
        if converted and field in ("dtype", "element_bytes"):
            continue
        if getattr(held, field) != getattr(wanted, field):
            where = f" of {wanted.component} of {wanted.layer} in group {wanted.group}"
            what_to_do = _what_to_do(field, held, wanted)
            _refuse(field, where, getattr(held, field), getattr(wanted, field), what_to_do=what_to_do)


def refuse_missing(sources: Sequence[CacheLayout], target: CacheLayout, wanted: PartLayout) -> NoReturn:
    """Say which part of `target` no source holds: the group, the layer, the component or heads.

    Raises
    ------
    LayoutMismatch
        Always.
    """
    several = len(sources) > 1
    held = [part for source in sources for part in source.parts if part.group == wanted.group]
    where = f"group {wanted.group}"
    if not held:
        names = {part.group for source in sources for part in source.parts}
        _refuse("groups", "", _listed(names), _listed(part.group for part in target.parts), several=several)
    of_target = [part for part in target.parts if part.group == wanted.group]
    layers = {part.layer for part in held}
    if wanted.layer not in layers:
        _refuse("layers", f" of {where}", _listed(layers), _listed(part.layer for part in of_target), several=several)
    held = [part for part in held if part.layer == wanted.layer]
    of_target = [part for part in of_target if part.layer == wanted.layer]
    components = {part.component for part in held}
    where = f"{wanted.layer} in {where}"
    if wanted.component not in components:
        wanted_components = _listed(part.component for part in of_target)
        _refuse("components", f" of {where}", _listed(components), wanted_components, several=several)
    held = [part for part in held if part.component == wanted.component]
    where = f" of {wanted.component} of {where}"
    _refuse("heads", where, _heads(held), _heads([wanted]), several=several)


def _what_to_do(field: Field, held: PartLayout, wanted: PartLayout) -> str:
    if field not in ("dtype", "element_bytes"):
        return ""
    pair = (held.dtype, wanted.dtype)
    if not may_convert(held, wanted, POSSIBLE):
        return _NO_CONVERSION
    return f"; to have them converted as they arrive, make the target's node with convert=({spelled(pair)!r},)"


def _refuse(
    field: Field, where: str, source: object, target: object, *, several: bool = False, what_to_do: str = ""
) -> NoReturn:
    holders = "the sources have" if several else "the source has"
    differ = "differ" if field.endswith("s") else "differs"
    raise LayoutMismatch(
        f"pair two caches: {field}{where} {differ}: {holders} {source}, the target has {target}{what_to_do}",
        field=field,
        source_value=str(source),
        target_value=str(target),
    )


def _kind(slots: bool) -> str:
    return "slots of state" if slots else "blocks of tokens"


def _listed(names: Iterable[str]) -> str:
    """Name a few of many, so that a message stays short."""
    ordered = sorted(set(names))
    if not ordered:
        return "nothing"
    rest = f" and {len(ordered) - _MOST_NAMES} more" if len(ordered) > _MOST_NAMES else ""
    return ", ".join(ordered[:_MOST_NAMES]) + rest


def _heads(parts: Sequence[PartLayout]) -> str:
    ranges = [f"{start}..{end - 1}" for start, end in head_ranges(parts)]
    rest = f" and {len(ranges) - _MOST_NAMES} more" if len(ranges) > _MOST_NAMES else ""
    return f"{', '.join(ranges[:_MOST_NAMES])}{rest} of {parts[0].total_kv_heads}"
