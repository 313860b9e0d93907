"""The table of docs/LAYOUTS.md, which tests execute."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs/LAYOUTS.md"
REFUSED = "refused: "


@dataclass(frozen=True, kw_only=True)
class Row:
    """One combination. `refused` is the field of the refusal; empty: the pair is served."""

    what: str
    source: str
    target: str
    refused: str


def rows() -> list[Row]:
    """Every row between the two marks of the document."""
    text = DOCUMENT.read_text()
    table = text.partition("<!-- table -->")[2].partition("<!-- end of table -->")[0]
    found = []
    for line in table.splitlines():
        cells = [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        if len(cells) != 4 or cells[0] in ("what", "") or set(cells[0]) <= {"-"}:
            continue
        what, source, target, outcome = cells
        assert outcome == "served" or outcome.startswith(REFUSED), line
        found.append(Row(what=what, source=source, target=target, refused=outcome.removeprefix(REFUSED).strip("`")))
    return [row if row.refused != "served" else Row(**{**vars(row), "refused": ""}) for row in found]


def refused_fields() -> set[str]:
    """The fields that some row refuses."""
    return {row.refused for row in rows()} - {""}
