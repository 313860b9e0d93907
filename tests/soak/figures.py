"""``python -m soak.figures build/soak/report.json``: the section of docs/RESULTS.md, from the report of a whole run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_TOLD = (
    "handoffs",
    "handoffs that arrived",
    "bytes that arrived, each compared",
    "bytes compared again and again",
    "kills with a restart at the same address",
    "stops",
    "link losses",
    "suspends",
    "dropped peers",
    "cancels",
    "expiries",
    "deadlines",
    "quiet points, each with a handoff from everybody to everybody",
)
_USED = ("descriptors", "mappings", "threads", "resident")


def section(report: dict[str, Any]) -> str:
    """Return it.

    Raises
    ------
    ValueError
        If the soak has not passed, or ended before its time: then there is nothing to tell in a table of results.
    """
    if not report["passed"] or report["seconds"] < report["asked_s"]:
        raise ValueError(f"this soak has not passed, or is not whole: {report['problem'] or report['seconds']}")
    load = report["machine"]["load"]
    lines = ["## An hour of mixed load", "", f"    make soak-mixed SEED={report['seed']}", ""]
    lines += [f"{report['processes']} processes on {report['machine']['cores']} cores, load {load} in the end.", ""]
    lines += ["| | |", "|---|---|", f"| seconds | {report['seconds']:,.0f} |", "| wrong bytes, lost blocks | 0, 0 |"]
    lines += [f"| {name} | {_number(report[name])} |" for name in _TOLD]
    by_lane, bytes_by_lane = report["arrived by lane"], report["bytes by lane"]
    lines += ["", "| lane | arrived | bytes |", "|---|---|---|"]
    lines += [f"| {lane} | {count:,} | {bytes_by_lane[lane]:,} |" for lane, count in sorted(by_lane.items())]
    members = list(dict.fromkeys(found["member"] for found in report["flatness"]))
    lines += ["", "| process, warm -> in the end | " + " | ".join(_USED) + " |", "|---|" + "---|" * len(_USED)]
    for member in members:
        of_one = {found["what"]: found for found in report["flatness"] if found["member"] == member}
        cells = [f"{of_one[what]['warm']:,} -> {of_one[what]['end']:,}" for what in _USED]
        lines.append(f"| {member} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    print(section(json.loads(Path(sys.argv[1]).read_text())))
