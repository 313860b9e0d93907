"""Writes what follows from the table of transitions: docs/STATES.md, and the rows of the Promela model.

``make states`` rewrites docs/STATES.md: ``python -m model.generate`` with ``tests`` on the path.
"""

from __future__ import annotations

from model.table import ROOT, TABLE, Row, parse, values

STATES = ROOT / "docs/STATES.md"
_INTRODUCTION = """# States of a handoff

Generated from [transitions.hpp](../csrc/kvlink/handoff/transitions.hpp) by `make states`; a test fails when it is old.
The books of both sides run from that table, and `make model-check` explores it with spin: crashes, reordering, expiry
at any time, and every guard taken out in turn.

Of the rows for one state and event, the first whose guards all hold is taken. If there is none, nothing happens. `none`
is where a machine is before it begins and after it has ended; a row to `same` stays where it is.
"""
_SIDES = {"offer": "source", "grant": "source", "pull": "target", "part": "target"}


def _diagram(rows: list[Row]) -> list[str]:
    """Return the mermaid lines of one machine; rows that stay where they are stand in the table only."""
    edges: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.to == "same":
            continue
        for state in row.states:
            labels = edges.setdefault((state, row.to), [])
            labels += [event for event in row.events if event not in labels]
    lines = ["```mermaid", "stateDiagram-v2"]
    for (state, to), labels in edges.items():
        if state == to:
            continue
        ends = ["[*]" if end == "none" else end for end in (state, to)]
        lines.append(f"  {ends[0]} --> {ends[1]}: {', '.join(labels)}")
    return [*lines, "```"]


def _table(rows: list[Row]) -> list[str]:
    lines = ["| row | at | on | if | goes to | does |", "|---|---|---|---|---|---|"]
    for row in rows:
        cells = [row.states, row.events, row.guards, (row.to,), row.actions]
        lines.append(f"| {row.index} | {' | '.join(', '.join(cell) for cell in cells)} |".replace("|  |", "| |"))
    return lines


def states_page(text: str) -> str:
    """Return docs/STATES.md as the table says it."""
    rows = parse(text)
    lines = _INTRODUCTION.splitlines()
    for machine, note in values(text, "Machine").items():
        own = [row for row in rows if row.machine == machine]
        lines += [
            "",
            f"## {machine.capitalize()}",
            "",
            note.split(": ", 1)[1].capitalize() + f" ({_SIDES[machine]}).",
            "",
        ]
        lines += [*_diagram(own), "", *_table(own)]
        notes = [f"- Row {row.index}: {row.why}" for row in own if row.why]
        lines += ["", *notes] if notes else []
    lines += ["", "## Guards", "", "| guard | holds when |", "|---|---|"]
    lines += [f"| {guard} | {note} |" for guard, note in values(text, "If").items()]
    return "\n".join(lines) + "\n"


def promela(text: str) -> str:
    """Return the rows as Promela: one inline for each machine and event. world.pml says what guards and actions are."""
    rows = parse(text)
    lines = [f"#define AT_{name} {number}" for number, name in enumerate(values(text, "At"))]
    inlines: list[str] = []
    for machine in values(text, "Machine"):
        for event in values(text, "On"):
            own = [row for row in rows if row.machine == machine and event in row.events]
            if own:
                inlines += [f"inline {machine}_{event}() {{", *_chain(own, "  "), "}"]
    return "\n".join(lines + inlines) + "\n"


def _chain(rows: list[Row], indent: str) -> list[str]:
    if not rows:
        return [f"{indent}skip"]
    row, rest = rows[0], rows[1:]
    where = " || ".join(f"{row.machine.upper()}_AT == AT_{state}" for state in row.states)
    guards = "".join(f" && IF_{row.machine}_{guard}" for guard in row.guards)
    steps = [f"GO_{row.machine}(AT_{row.to})"] if row.to != "same" else []
    steps += [f"DO_{row.machine}_{action}()" for action in row.actions]
    lines = [f"{indent}if", f"{indent}:: (({where}){guards}) -> {'; '.join(steps) or 'skip'}"]
    return [*lines, f"{indent}:: else ->", *_chain(rest, indent + "  "), f"{indent}fi"]


def main() -> None:
    """Rewrite the page."""
    STATES.write_text(states_page(TABLE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
