"""Geometry that a peer made up is refused with a typed error before anything moves, or is harmless."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from kvlink._native import Plan
from kvlink.errors import InvalidArgument, KvlinkError, LayoutMismatch, NotOffered
from kvlink.layout import CacheLayout, KVCache, validate_layout
from kvlink.plan import compile_template, select

LAYERS = ("l0", "l1")
BLOCKS, TOKENS, HEADS, DIM = 5, 4, 2, 3
HUGE = (1 << 63) - 1


def honest() -> CacheLayout:
    memory = {layer: np.zeros((2, BLOCKS, TOKENS, HEADS, DIM), np.uint16) for layer in LAYERS}
    return KVCache.from_tensors(memory, axes="kv block token head dim", block_tokens=TOKENS).layout


def changed(layout: CacheLayout, change: dict[str, Any], *, part: int = 0) -> Any:
    """What a peer's message says, as plain data: nothing has checked it."""
    told = msgspec.to_builtins(layout)
    for key, value in change.items():
        if key in told:
            told[key] = value
        elif key in told["groups"][0]:
            told["groups"][0][key] = value
        else:
            told["parts"][part][key] = value
    return told


def received(told: Any) -> CacheLayout:
    """Take a layout from a peer as a node does."""
    try:
        layout = msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=CacheLayout)
    except msgspec.DecodeError as error:
        raise InvalidArgument(str(error)) from error
    validate_layout(layout)
    return layout


def plan_between(source: CacheLayout, target: CacheLayout, *, end_token: int = 10) -> Plan:
    (taken,) = select([source], target, seed=0)
    tables = np.array([3, 0, 1], np.int32), np.array([2, 4, 0], np.int32)
    return Plan(compile_template(source, taken), [tables[0]], [tables[1]], end_token=end_token)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"offset": HUGE}, "ends at byte"),
        ({"block_stride": HUGE}, "ends at byte"),
        ({"block_stride": 1 << 62, "num_blocks": 9}, "ends at byte"),
        ({"offset": 1 << 63}, "offset"),
        ({"offset": -1}, "offset"),
        ({"head_dim": 1 << 31}, "head_dim"),
        ({"num_blocks": (1 << 31) - 1}, "ends at byte"),
        ({"block_tokens": (1 << 31) - 1}, "share bytes"),
        ({"region_bytes": [HUGE + 1, HUGE + 1]}, "region_bytes"),
        ({"region_bytes": [8, 8]}, "ends at byte"),
        ({"region_bytes": []}, "region_bytes"),
        ({"region": 2}, "region 2 of 2"),
        ({"block_stride": 0}, "blocks share bytes"),
        ({"block_stride": 46}, "blocks share bytes"),
        ({"token_stride": 0}, "tokens share bytes"),
        ({"head_stride": 0}, "heads share bytes"),
        ({"dim_stride": 1}, "dims share bytes"),
        ({"offset": 2}, "share bytes"),
        ({"layer": "l1"}, "both hold head 0"),
        ({"head_start": 1}, "heads in all"),
        ({"groups": []}, "groups"),
        ({"slots": True}, "neither tokens nor a window"),
        ({"slots": True, "block_tokens": 1}, "slots hold nothing else"),
        ({"component": "state"}, "slots hold nothing else"),
        ({"block_pool": ""}, "block_pool"),
        ({"block_pool": 7}, "block_pool"),
    ],
)
def test_a_layout_that_overflows_overlaps_or_leaves_its_region_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        received(changed(honest(), change))


def test_blocks_that_alias_each_other_are_refused_in_a_table_too() -> None:
    template = compile_template(honest(), honest())
    sources = np.array([0, 1, 2], np.int32)
    for target in ([3, 1, 3], [3, 5, 1], [3, -7, 1], [3]):
        with pytest.raises(InvalidArgument):
            Plan(template, [sources], [np.array(target, np.int32)], end_token=12)
    for source, error in (([0, 9, 1], InvalidArgument), ([0, -2, 1], InvalidArgument), ([0, -1, 1], NotOffered)):
        with pytest.raises(error):
            Plan(template, [np.array(source, np.int32)], [sources], end_token=12)


NUMBERS = (-1, 0, 1, 2, 3, 6, 7, 47, 48, 240, (1 << 31) - 1, 1 << 31, (1 << 32) + 1, HUGE, HUGE + 1, (1 << 64) - 1)
FIELDS = (
    *("head_start", "head_count", "total_kv_heads", "head_dim", "element_bytes", "region", "offset", "block_stride"),
    *("token_stride", "head_stride", "dim_stride", "num_blocks", "block_tokens", "window", "slots", "block_pool"),
    *("layer", "component", "dtype", "group", "region_bytes"),
)


def hostile_change(rng: np.random.Generator) -> dict[str, Any]:
    change: dict[str, Any] = {}
    for field in rng.choice(FIELDS, rng.integers(1, 4), replace=False).tolist():
        number = NUMBERS[rng.integers(len(NUMBERS))]
        change[field] = {
            "layer": "l1",
            "component": ("k", "v", "state", "scale")[rng.integers(4)],
            "dtype": ("uint16", "uint8")[rng.integers(2)],
            "group": "other",
            "slots": True,
            "block_pool": "full",
            "window": number or None,
            "region_bytes": [abs(number), 480],
        }.get(field, number)
    return change


def ends(rows: np.ndarray, *, side: int) -> list[tuple[int, int]]:
    """The region of each copy on one side, and one past its last byte there. Python's integers do not overflow."""
    found = []
    for row in rows.tolist():
        run, inner, outer = row[4:7]
        found.append((row[side], row[2 + side] + (inner - 1) * row[7 + side] + (outer - 1) * row[9 + side] + run))
    return found


@pytest.mark.parametrize("liar", ["source", "target"])
def test_numbers_that_a_peer_made_up_are_refused_or_harmless(liar: str) -> None:
    """What passes stays inside the regions of both, and a source cannot make a byte of the target be written twice."""
    moved = 0
    for number in range(1500):
        rng = np.random.default_rng([20, number])
        told = changed(honest(), hostile_change(rng), part=int(rng.integers(4)))
        try:
            layout = received(told)
            source, target = (layout, honest()) if liar == "source" else (honest(), layout)
            plan = plan_between(source, target, end_token=int(rng.integers(0, 13)))
        except (InvalidArgument, LayoutMismatch, NotOffered):
            continue
        rows = plan.copies()
        moved += len(rows) > 0
        for side, sizes in enumerate((source.region_bytes, target.region_bytes)):
            assert all(end <= sizes[region] for region, end in ends(rows, side=side)), told
        if liar == "source":
            assert len(set(bytes_written(rows))) == plan.total_bytes, told
    assert moved > 50, "most changes were refused: the test has lost its point"


def bytes_written(rows: np.ndarray) -> list[tuple[int, int]]:
    found = []
    for _, region, _, offset, run, inner, outer, _, inner_stride, _, outer_stride in rows.tolist():
        for o in range(outer):
            for i in range(inner):
                start = offset + o * outer_stride + i * inner_stride
                found += [(region, byte) for byte in range(start, start + run)]
    return found


def test_every_refusal_is_one_of_kvlink() -> None:
    """No ValueError of NumPy, OverflowError or TypeError of a binding reaches the connection's thread."""
    refusals = []
    for number in range(1500):
        rng = np.random.default_rng([21, number])
        try:
            plan_between(received(changed(honest(), hostile_change(rng))), honest())
        except KvlinkError as error:
            refusals.append(str(error))
    assert len(refusals) > 1000
    assert all(refusals)
