"""Reads the table of transitions out of the text of csrc/kvlink/handoff/transitions.hpp."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "csrc/kvlink/handoff/transitions.hpp"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table, and where in the text it stands."""

    index: int
    machine: str
    states: tuple[str, ...]
    events: tuple[str, ...]
    guards: tuple[str, ...]
    to: str
    actions: tuple[str, ...]
    why: str
    span: tuple[int, int]

    @property
    def title(self) -> str:
        """What a person calls the row: machine, states and events."""
        states = "|".join(self.states) if len(self.states) <= 3 else f"{self.states[0]}|..."
        return f"{self.machine} {states} {'|'.join(self.events)}"


def values(text: str, enum: str) -> dict[str, str]:
    """Return the names of an enum in their order, each with the comment behind it."""
    body = re.search(rf"enum class {enum}\b[^{{]*\{{(.*?)\}};", text, re.DOTALL)
    assert body, f"the table has no enum {enum}"
    return {name: note or "" for name, note in re.findall(r"^\s*(\w+),(?:\s*// (.*))?$", body[1], re.MULTILINE)}


def _sets(text: str) -> dict[str, tuple[str, ...]]:
    found = re.findall(r"constexpr Set<At> (k\w+)\{(.*?)\};", text, re.DOTALL)
    return {name: tuple(re.findall(r"At::(\w+)", body)) for name, body in found}


def _fields(text: str) -> list[str]:
    """Split what stands between the outer braces at its outer commas."""
    fields, depth, start = [], 0, 0
    for at, char in enumerate(text):
        depth += (char == "{") - (char == "}")
        if char == "," and depth == 0:
            fields.append(text[start:at])
            start = at + 1
    return [*fields, text[start:]]


def parse(text: str) -> list[Row]:
    """Return the rows in their order. Whitespace, line breaks and comments have no meaning."""
    sets = _sets(text)
    begin = text.index("kTransitions[] = {") + len("kTransitions[] = {")
    rows: list[Row] = []
    note: list[str] = []
    at = begin
    while True:
        match = re.compile(r"\s*(?:(//[^\n]*\n)|(\})|(\{)|(,))").match(text, at)
        assert match, f"not a row: {text[at : at + 60]!r}"
        at = match.end()
        if match[1]:
            note.append(match[1].removeprefix("//").strip())
        elif match[2]:
            return rows
        elif match[3]:
            end = _closing(text, at)
            rows.append(_row(text[at:end], sets, index=len(rows), why=" ".join(note), span=(match.start(3), end + 1)))
            note, at = [], end + 1


def _closing(text: str, at: int) -> int:
    depth = 1
    while depth:
        depth += (text[at] == "{") - (text[at] == "}")
        at += 1
    return at - 1


def _row(body: str, sets: dict[str, tuple[str, ...]], *, index: int, why: str, span: tuple[int, int]) -> Row:
    machine, states, events, guards, to, actions = _fields(re.sub(r"//[^\n]*\n", "", body))
    named = states.strip()
    return Row(
        index=index,
        machine=re.findall(r"Machine::(\w+)", machine)[0],
        states=sets[named] if named in sets else tuple(re.findall(r"At::(\w+)", states)),
        events=tuple(re.findall(r"On::(\w+)", events)),
        guards=tuple(re.findall(r"If::(\w+)", guards)),
        to=re.findall(r"At::(\w+)", to)[0],
        actions=tuple(re.findall(r"Do::(\w+)", actions)),
        why=why,
        span=span,
    )


def without(text: str, row: Row, guard: str) -> str:
    """Return the table's text with one guard of one row taken out."""
    begin, end = row.span
    kept, removed = re.subn(rf"If::{guard}\b(?:,\s*)?", "", text[begin:end])
    assert removed == 1, f"{row.title} has no guard {guard}"
    return text[:begin] + re.sub(r",\s*\}", "}", kept) + text[end:]
