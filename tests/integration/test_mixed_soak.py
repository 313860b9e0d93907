"""The mixed soak in small: it passes where nothing is wrong, and finds what is planted."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from helpers.soak import SEED, rounds
from soak.run import run_soak

IS_LONG = bool(rounds(0, 1))
SECONDS = float(rounds(2, 30))
#: Of every town, who is never killed and who is; all of them in the long form.
FEW = ("anna", "carl", "dora", "gina", "hugo")
PAIR = ("anna", "carl")


@pytest.mark.slow
def test_a_mixed_load_with_kills_stops_and_cuts_loses_nothing(tmp_path: Path) -> None:
    result = run_soak(seconds=SECONDS, seed=SEED, quiet_ticks=1000, two_hosts=IS_LONG, only=() if IS_LONG else FEW)
    told = result.write(tmp_path).read_text()
    assert result.passed, told
    assert "PASSED" in told
    facts = json.loads((tmp_path / "report.json").read_text())
    assert facts["passed"]
    assert facts["quiet points, each with a handoff from everybody to everybody"] == 2
    assert facts["handoffs that arrived"] > 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "found"),
    [
        ("flipped bit", r"succeeded with \d+ wrong words"),
        ("lost block", "blocks are lost"),
        ("stray write", "somebody wrote 1 words"),
        ("early release", "somebody wrote"),
        ("leaked descriptors", ""),
    ][: rounds(2, 5)],
)
def test_what_is_planted_is_found(plant: str, found: str, tmp_path: Path) -> None:
    """The negative control: each would pass unseen if the soak compared too little."""
    result = run_soak(
        seconds=rounds(20, 60), seed=SEED, quiet_ticks=20, plant=plant, two_hosts=False, only=() if IS_LONG else PAIR
    )
    told = result.write(tmp_path).read_text()
    assert not result.passed, told
    assert "FAILED" in told
    if not found:
        assert not result.problem
        assert [one.what for one in result.flatness if not one.is_flat] == ["descriptors"] * 3, told  # of all elders
    else:
        assert re.search(found, result.problem), told
