"""Two layouts, each perhaps of a hostile peer: what passes the check has a byte of its own for every coordinate, inside
its region; and what can be paired becomes a template that the native core takes.
"""

from __future__ import annotations

from typing import Any

import msgspec

from fuzz.draws import Draws
from fuzz.samples import plain_layout
from kvlink.errors import LayoutMismatch, ProtocolError
from kvlink.handoff.pairing import unpack_layout
from kvlink.layout import CacheLayout
from kvlink.plan import compile_template, select

_LAYOUT = plain_layout()
_NUMBERS = ("head_start", "head_count", "total_kv_heads", "head_dim", "element_bytes", "region", "offset")
_STRIDES = ("block_stride", "token_stride", "head_stride", "dim_stride")
_MOST_BYTES = 4096


def _reshaped(layout: dict[str, Any], draws: Draws) -> dict[str, Any]:
    """Return a copy with other numbers, most of them small."""
    changed = draws.spoiled(layout, most=1)
    parts = changed.get("parts")
    for _ in range(draws.below(5)):
        if not isinstance(parts, list) or not parts:
            break
        part = parts[draws.below(len(parts))]
        if isinstance(part, dict):
            fields = _STRIDES if draws.byte() & 1 else _NUMBERS
            part[fields[draws.below(len(fields))]] = draws.number(32)
    groups = changed.get("groups")
    if isinstance(groups, list) and groups and draws.byte() >= 192 and isinstance(groups[0], dict):
        groups[0][("num_blocks", "block_tokens", "window")[draws.below(3)]] = draws.number(6)
    return changed


def _unpacked(plain: dict[str, Any]) -> CacheLayout | None:
    try:
        return unpack_layout.__wrapped__(msgspec.msgpack.encode(plain))
    except ProtocolError:
        return None


def _check_bytes(layout: CacheLayout) -> None:
    """Visit every byte of a small layout: none may be there twice, or outside."""
    groups = {group.name: group for group in layout.groups}
    if any(group.block_pool is not None for group in layout.groups):
        return  # such groups may share bytes
    sizes = [
        groups[part.group].num_blocks * groups[part.group].block_tokens * part.head_count * part.head_dim
        for part in layout.parts
    ]
    if sum(size * part.element_bytes for size, part in zip(sizes, layout.parts, strict=True)) > _MOST_BYTES:
        return
    seen: set[tuple[int, int]] = set()
    for part in layout.parts:
        group = groups[part.group]
        starts = [part.offset]
        for count, stride in (
            (group.num_blocks, part.block_stride),
            (group.block_tokens, part.token_stride),
            (part.head_count, part.head_stride),
            (part.head_dim, part.dim_stride),
            (part.element_bytes, 1),
        ):
            starts = [start + index * stride for start in starts for index in range(count)]
        places = {(part.region, start) for start in starts}
        assert len(places) == len(starts)
        assert not places & seen
        assert max(starts) < layout.region_bytes[part.region]
        seen |= places


def one(data: bytes) -> None:
    """Check a layout, and pair it with another."""
    draws = Draws(data)
    source = _unpacked(_reshaped(_LAYOUT, draws))
    if source is None:
        return
    if draws.byte() >= 192:  # a walk over every byte takes as long as hundreds of other inputs
        _check_bytes(source)
    target = _unpacked(_reshaped(_LAYOUT, draws)) if draws.byte() & 1 else source
    if target is None:
        return
    try:
        share = select([source], target, seed=draws.byte())[0]
        template = compile_template(source, share)
    except LayoutMismatch:
        return
    assert template.op_count >= len(share.parts)
