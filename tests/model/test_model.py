"""The table of transitions: the page that follows from it is current, and its model holds and needs its guards."""

from __future__ import annotations

from pathlib import Path

import pytest
from model.check import WORLDS, explore, explore_until_wrong, guards, missing_tool, reformatted
from model.generate import STATES, promela, states_page
from model.table import TABLE, parse, without

TEXT = TABLE.read_text(encoding="utf-8")
needs_spin = pytest.mark.skipif(bool(missing_tool()), reason=missing_tool() or "spin is here")


def test_the_page_of_states_is_current():
    assert STATES.read_text(encoding="utf-8") == states_page(TEXT), "run `make states`"


def test_whitespace_and_comments_mean_nothing():
    again = reformatted(TEXT)
    assert again != TEXT
    assert promela(again) == promela(TEXT)


def test_every_guard_can_be_taken_out_by_itself():
    rows = parse(TEXT)
    for row, guard in guards(TEXT):
        changed = [
            number
            for number, (old, new) in enumerate(zip(rows, parse(without(TEXT, row, guard)), strict=True))
            if old.guards != new.guards
        ]
        assert changed == [row.index]


@needs_spin
def test_the_model_of_the_table_holds(tmp_path: Path):
    explored = explore(TEXT, WORLDS["with a conversion"], tmp_path)
    assert explored.passed, explored.error
    assert explored.states > 5_000


@needs_spin
@pytest.mark.parametrize(("machine", "event", "guard"), [("grant", "confirm", "same_attempt")])
def test_the_model_finds_what_a_guard_is_for(tmp_path: Path, machine: str, event: str, guard: str):
    row = next(row for row, name in guards(TEXT) if row.machine == machine and event in row.events and name == guard)
    assert "assertion violated" in explore_until_wrong(without(TEXT, row, guard), tmp_path)
