"""Which lanes two nodes could use follows from what connecting found out, and their order from what each costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvlink
from kvlink.errors import ConfigError
from kvlink.layout import CacheLayout
from kvlink.transport import LANES, LaneChoice, LaneFacts, check_lanes, choose_lanes, mean_run_bytes

EVERYTHING: dict[str, Any] = {
    "same_host": True,
    "mapped_regions": True,
    "readable_pid": 7,
    "ucx": True,
    "keys": True,
    "run_bytes": 64 << 10,
}


@pytest.mark.parametrize(
    ("changes", "lanes"),
    [
        ({}, ["mapped", "vectored", "get", "staged"]),
        ({"mapped_regions": False}, ["vectored", "get", "staged"]),
        ({"readable_pid": 0}, ["mapped", "get", "staged"]),
        ({"keys": False}, ["mapped", "vectored", "staged"]),
        ({"ucx": False}, ["mapped", "vectored"]),
        ({"same_host": False}, ["get", "staged"]),
        ({"same_host": False, "keys": False}, ["staged"]),
        ({"same_host": False, "ucx": False}, []),
    ],
)
def test_the_fastest_possible_lane_comes_first(changes: dict[str, Any], lanes: list[str]) -> None:
    facts = LaneFacts(**{**EVERYTHING, **changes})
    assert choose_lanes(facts, allowed=LANES).lanes == tuple(lanes)
    assert choose_lanes(facts, allowed=("staged", "mapped")).lanes == tuple(
        lane for lane in lanes if lane in ("staged", "mapped")
    )


@pytest.mark.parametrize(
    ("run_bytes", "same_host", "lanes"),
    [
        (128, True, ("mapped", "staged", "vectored", "get")),
        (256, True, ("mapped", "staged", "vectored", "get")),
        (1024, True, ("mapped", "vectored", "staged", "get")),
        (4096, True, ("mapped", "vectored", "get", "staged")),
        (128, False, ("staged", "get")),
        (4096, False, ("get", "staged")),
    ],
)
def test_short_runs_are_gathered_and_long_ones_read_in_place(
    run_bytes: int, same_host: bool, lanes: tuple[str, ...]
) -> None:
    facts = LaneFacts(**{**EVERYTHING, "run_bytes": run_bytes, "same_host": same_host})
    assert choose_lanes(facts, allowed=LANES).lanes == lanes


def test_the_reason_names_the_choice_the_estimates_and_what_stood_against_the_others() -> None:
    facts = LaneFacts(**{**EVERYTHING, "mapped_regions": False, "keys": False})
    reason = choose_lanes(facts, allowed=("mapped", "vectored")).reason
    assert reason.startswith("vectored from foreign memory on this host; estimated GB/s for runs of 65536 bytes")
    assert ": vectored 3.2;" in reason
    assert "mapped: not all of the source's memory is pools" in reason
    assert "get: the source gave no remote keys" in reason
    assert "staged: not allowed by lanes=" in reason


def test_a_source_that_delivers_nothing_needs_no_estimate() -> None:
    choice = choose_lanes(LaneFacts(**{**EVERYTHING, "run_bytes": 0}), allowed=LANES)
    assert choice.lanes == LANES
    assert "nothing to move" in choice.reason


def test_a_lane_that_could_not_be_opened_is_left_out_and_named() -> None:
    choice = LaneChoice(("mapped", "vectored", "staged"), "because")
    assert choice.among(["mapped", "vectored", "staged"]) is choice
    left = choice.among(["staged", "vectored"])
    assert left.lanes == ("vectored", "staged")
    assert left.reason == "vectored, since opening mapped failed; because"


def test_the_user_may_name_the_lanes() -> None:
    assert check_lanes(None) == LANES
    assert check_lanes(["get"]) == check_lanes("get") == ("get",)  # type: ignore[arg-type]
    for wrong in ([], ["get", "pigeon"], ""):
        with pytest.raises(ConfigError, match="mapped, vectored, get, staged"):
            check_lanes(wrong)


def layout(axes: str, *, tokens: int = 4, heads: range = range(0, 8), dims: int = 16) -> CacheLayout:
    sizes = {"kv": 2, "block": 3, "token": tokens, "head": len(heads), "dim": dims}
    tensor = np.zeros([sizes[axis] for axis in axes.split()], dtype=np.uint16)
    described = kvlink.KVCache.from_tensors(
        {"a": tensor, "b": tensor.copy()}, axes=axes, block_tokens=tokens, heads=heads, total_kv_heads=8
    )
    return described.layout


NHD, HND = "kv block token head dim", "kv block head token dim"


@pytest.mark.parametrize(
    ("source", "target", "run_bytes"),
    [
        (layout(NHD), layout(NHD), 4 * 8 * 32),
        (layout(HND), layout(HND), 4 * 8 * 32),
        (layout(NHD), layout(HND), 32),
        (layout(NHD), layout(NHD, heads=range(2, 4)), 2 * 32),
        (layout(NHD, heads=range(0, 2)), layout(NHD, heads=range(0, 2)), 4 * 2 * 32),
        (layout(HND), layout(HND, heads=range(2, 4)), 4 * 2 * 32),
        (layout(NHD, tokens=4), layout(NHD, tokens=6), 2 * 8 * 32),
        (layout(NHD, tokens=4), layout(NHD, tokens=5), 8 * 32),
        (layout(NHD, heads=range(0, 4)), layout(NHD, heads=range(4, 8)), 0),
    ],
    ids=["same", "same-hnd", "hnd", "slice", "alike-ranks", "slice-hnd", "gcd", "coprime", "nothing"],
)
def test_runs_end_where_either_side_jumps(source: CacheLayout, target: CacheLayout, run_bytes: int) -> None:
    assert mean_run_bytes(source, target) == run_bytes
