"""Explores the model of the table with spin; then takes out one guard after another and looks who notices.

``make model-check`` runs it, as ``python -m model.check`` with ``tests`` on the path. The intact table must pass every
world. A table without one guard must fail in one of them, or make the native program tests/cpp/test_handoff_books.cpp
fail, which runs the books on it.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from helpers.native_programs import ROOT, build_program
from model.generate import promela
from model.table import TABLE, Row, parse, values, without

BOOKS = ROOT / "tests/cpp/test_handoff_books.cpp"
WORLD = Path(__file__).with_name("world.pml")
_BOUNDS = ("READERS", "STARTS", "LIVES", "DEATHS", "RENEWALS", "AGAIN", "WIDE", "CHECKS", "PUSHES", "CONVERTS", "NAMED")
# What each world allows, see world.pml. The smallest come first: most mutations are found there.
WORLDS = {
    "two readers, two attempts": (2, 2, 0, 0, 1, 1, 1, 0, 0, 0, 0),
    "the source restarts": (1, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0),
    "a target restarts": (2, 2, 0, 1, 0, 0, 0, 0, 0, 0, 0),
    "with integrity": (1, 2, 0, 0, 0, 0, 0, 1, 0, 0, 0),
    "with integrity and a conversion": (1, 2, 0, 0, 0, 0, 0, 1, 0, 1, 0),
    "with a conversion": (1, 2, 0, 0, 0, 0, 0, 0, 0, 1, 0),
    "a push": (1, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0),
    "a push with a conversion": (1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 0),
    "a push by a source that was named, and restarts": (1, 1, 1, 0, 0, 0, 0, 0, 1, 0, 1),
}
#: Explored for the intact table only.
LARGE_WORLDS = {
    "two readers, with integrity": (2, 2, 0, 0, 0, 0, 0, 1, 0, 0, 0),
    "two targets with two attempts each": (1, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0),
    "two readers, three attempts": (2, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0),
    "a target restarts, three attempts": (2, 3, 0, 1, 0, 0, 0, 0, 0, 0, 0),
    "the source restarts, three attempts": (1, 3, 1, 0, 0, 0, 0, 0, 0, 0, 0),
    "a push, two reservations": (1, 2, 0, 0, 0, 0, 0, 0, 1, 0, 0),
    "a push, and the source restarts": (1, 2, 1, 0, 0, 0, 0, 0, 1, 0, 0),
    "a push, and the target restarts": (1, 2, 0, 1, 0, 0, 0, 0, 1, 0, 0),
}
_PUSH_STATES = {"reserved", "filling"}
_PUSH_EVENTS = {"push", "piece", "commit", "look", "told", "decline"}
NO_SPIN = "spin is not installed: apt-get install spin"
_LIMIT_S = 600


@dataclass(frozen=True)
class Explored:
    """What spin found in one world."""

    states: int
    seconds: float
    error: str  # empty: none

    @property
    def passed(self) -> bool:
        """Whether everything was explored and nothing was wrong."""
        return not self.error


def missing_tool() -> str:
    """Return which program is missing and where it comes from; empty if none."""
    if shutil.which("spin") is None:
        return NO_SPIN
    return "" if shutil.which("gcc") else "gcc is not installed: apt-get install gcc"


def explore(table: str, world: tuple[int, ...], folder: Path, *, optimise: str = "-O0") -> Explored:
    """Run spin on the model of `table`, exhaustively. `optimise` pays from a million states on."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.pml").write_text(promela(table), encoding="utf-8")
    shutil.copy(WORLD, folder)
    began = time.monotonic()
    bounds = [f"-D{name}={value}" for name, value in zip(_BOUNDS, world, strict=True)]
    _run(["spin", "-a", *bounds, WORLD.name], folder)
    if not (folder / "pan.c").exists():
        raise RuntimeError(f"spin made no model checker in {folder}")
    _run(["gcc", optimise, "-w", "-DSAFETY", "-DCOLLAPSE", "-DMEMLIM=4000", "-o", "pan", "pan.c"], folder)
    report = _run(["./pan", "-m100000", "-w22"], folder)
    found = re.search(r"pan:\d+: (.*?) \(at depth", report)
    states = re.search(r"(\d+) states, stored", report)
    errors = re.search(r"errors: (\d+)", report)
    complete = errors and errors[1] == "0" and "Search not completed" not in report
    error = found[1] if found else ("" if complete else f"spin gave up: {report[-300:]}")
    return Explored(int(states[1]) if states else 0, time.monotonic() - began, error)


def _run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if command[0] != "./pan" and done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
    return done.stdout


def explore_until_wrong(table: str, folder: Path, worlds: Mapping[str, tuple[int, ...]] = WORLDS) -> str:
    """Return the first assertion that fails in any of `worlds`, and in which; empty if none does."""
    for number, (name, world) in enumerate(worlds.items()):
        explored = explore(table, world, folder / str(number))
        if not explored.passed:
            return f"{name}: {explored.error}"
    return ""


def is_modelled(row: Row, guard: str) -> bool:
    """Return whether the world has the row's events and can tell when the guard holds: FETCH and clocks it has not."""
    world = WORLD.read_text(encoding="utf-8")
    if row.states == ("sending",):
        return False
    always = re.search(rf"^#define IF_{row.machine}_{guard} true$", world, re.MULTILINE)
    return not always and any(f"{row.machine}_{event}()" in world for event in row.events)


def worlds_of(row: Row) -> dict[str, tuple[int, ...]]:
    """Return the worlds in which the row can be taken: what is only of pushes needs those with one."""
    if not (set(row.states) <= _PUSH_STATES or set(row.events) <= _PUSH_EVENTS):
        return WORLDS
    return {name: world for name, world in WORLDS.items() if world[_BOUNDS.index("PUSHES")]}


def reformatted(text: str) -> str:
    """Return the same table with a comment and other whitespace in every row."""
    head, mark, rows = text.partition("kTransitions[] = {")
    return head + mark + rows.replace("{Machine::", "  // No change.\n{ Machine::").replace(", At::", ",\n  At::")


def guards(text: str) -> list[tuple[Row, str]]:
    """Return each guard of each row."""
    return [(row, guard) for row in parse(text) for guard in row.guards]


def books_notice(program: Path, row: Row, guard: str, text: str) -> str:
    """Return the test of tests/cpp/test_handoff_books.cpp that fails without the guard; empty if none does."""
    number = list(values(text, "If")).index(guard)
    command = [str(program), str(row.index), str(number)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    return f"test {done.stdout.split()[-1]}" if done.returncode and done.stdout.split() else ""


def who_notices(text: str, row: Row, guard: str, *, program: Path, folder: Path, both: bool) -> str:
    """Return what fails without one guard: in the books, else in the model, or in `both`. Empty if nothing does."""
    mutated = without(text, row, guard)
    if [each.guards for each in parse(text)] == [each.guards for each in parse(mutated)]:
        raise RuntimeError(f"{row.title}: taking out {guard} changed nothing")
    found = [books_notice(program, row, guard, text)]
    if (both or not found[0]) and is_modelled(row, guard):
        found.append(explore_until_wrong(mutated, folder, worlds_of(row)))
    return "; ".join(each for each in found if each)


def main() -> int:
    """Check everything; one line a world and a guard."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="model checkers at once")
    parser.add_argument("--both", action="store_true", help="ask the model, too, where a test of the books notices")
    options = parser.parse_args()
    if missing_tool():
        print(missing_tool())
        return 1
    text = TABLE.read_text(encoding="utf-8")
    failures = 0
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(options.jobs) as pool:
        folder = Path(place)
        intact = {**WORLDS, **LARGE_WORLDS}
        runs = [
            pool.submit(
                explore, text, world, folder / f"intact-{number}", optimise="-O2" if name in LARGE_WORLDS else "-O0"
            )
            for number, (name, world) in enumerate(intact.items())
        ]
        for name, run in zip(intact, runs, strict=True):
            explored = run.result(timeout=_LIMIT_S)
            failures += not explored.passed
            print(
                f"{name}: {explored.error or 'passes'}, {explored.states} states, {explored.seconds:.1f} s", flush=True
            )
        unchanged = explore_until_wrong(reformatted(text), folder / "reformatted")
        failures += bool(unchanged)
        print(f"reformatted: {unchanged or 'passes'}", flush=True)
        program = build_program(BOOKS, folder)
        cases = guards(text)
        found = pool.map(
            lambda case: who_notices(
                text, *case[1], program=program, folder=folder / f"without-{case[0]}", both=options.both
            ),
            enumerate(cases),
        )
        for (row, guard), notice in zip(cases, found, strict=True):
            failures += not notice
            print(f"row {row.index} ({row.title}) without {guard}: {notice or 'NOBODY NOTICED'}", flush=True)
    print("model-check: " + (f"{failures} failures" if failures else "all as it should be"))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
