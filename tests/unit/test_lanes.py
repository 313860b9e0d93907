"""Which lanes two nodes could use follows from what connecting found out."""

from __future__ import annotations

from typing import Any

import pytest

from kvlink.errors import ConfigError
from kvlink.handoff.lanes import LANES, LaneFacts, check_lanes, usable_lanes

EVERYTHING: dict[str, Any] = {"same_host": True, "mapped_regions": True, "readable_pid": 7, "ucx": True, "keys": True}


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
def test_the_cheapest_possible_lane_comes_first(changes: dict[str, Any], lanes: list[str]) -> None:
    facts = LaneFacts(**{**EVERYTHING, **changes})
    assert usable_lanes(facts, allowed=LANES) == lanes
    assert usable_lanes(facts, allowed=("staged", "mapped")) == [lane for lane in lanes if lane in ("staged", "mapped")]


def test_the_user_may_name_the_lanes() -> None:
    assert check_lanes(None) == LANES
    assert check_lanes(["get"]) == check_lanes("get") == ("get",)  # type: ignore[arg-type]
    for wrong in ([], ["get", "pigeon"], ""):
        with pytest.raises(ConfigError, match="mapped, vectored, get, staged"):
            check_lanes(wrong)
