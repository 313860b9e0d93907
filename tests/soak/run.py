"""One soak from its seed to its report."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kvlink
from kvlink.testing import WorkerFailed
from soak.conductor import Conductor
from soak.flatness import Flatness, judge
from soak.towns import two_hosts_or_why_not

#: What nobody cleans up after a process that was killed would pile up here.
_LEFT_BEHIND = Path("/dev/shm")


@dataclass(kw_only=True)
class Result:
    """What a soak has shown. Without a problem it has passed."""

    seed: int
    seconds: float
    asked_s: float
    problem: str
    facts: dict[str, Any]
    flatness: list[Flatness] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """The verdict."""
        return not self.problem and all(found.is_flat for found in self.flatness)

    def write(self, folder: Path) -> Path:
        """Write both reports; returns the readable one."""
        folder.mkdir(parents=True, exist_ok=True)
        flat = [found.as_dict() for found in self.flatness]
        told = {"passed": self.passed, "seed": self.seed, "seconds": round(self.seconds, 1), "asked_s": self.asked_s}
        told.update(problem=self.problem, **self.facts, flatness=flat)
        (folder / "report.json").write_text(json.dumps(told, indent=1) + "\n")
        path = folder / "report.md"
        path.write_text(self._readable())
        return path

    def _readable(self) -> str:
        lines = [f"# Mixed soak: {'PASSED' if self.passed else 'FAILED'}", ""]
        lines += [f"{self.seconds:,.0f} of {self.asked_s:,.0f} s, SEED={self.seed}, kvlink {kvlink.__version__}", ""]
        if self.problem:
            lines += ["```", self.problem, "```", ""]
        for title, value in self.facts.items():
            if isinstance(value, dict):
                lines += [f"| {title} | |", "|---|---|"]
                lines += [f"| {name} | {_told(number)} |" for name, number in sorted(value.items())] + [""]
            else:
                lines.append(f"- {title}: {_told(value)}")
        lines += ["", "| process, from the first to the last quiet point | warm | end | flat |", "|---|---|---|---|"]
        lines += [
            f"| {found.member}, {found.what} | {found.warm:,} | {found.end:,} | {_yes(found)} |"
            for found in self.flatness
        ]
        return "\n".join(lines) + "\n"


def run_soak(
    *, seconds: float, seed: int, quiet_ticks: int, plant: str = "", two_hosts: bool = True, only: tuple[str, ...] = ()
) -> Result:
    """Run one, whatever comes of it; `plant` names what it has to find, `only` the members that take part."""
    began, problem = time.monotonic(), ""
    left_before = _files_left()
    with two_hosts_or_why_not(two_hosts) as (network, why_not):
        conductor = Conductor(seed=seed, network=network, quiet_ticks=quiet_ticks, plant=plant, only=only)
        try:
            conductor.run(seconds)
        except (WorkerFailed, AssertionError, kvlink.KvlinkError) as error:
            problem = f"tick {conductor.tick}: {type(error).__name__}: {error}{conductor.stderr()}"
        finally:
            conductor.end()
    facts = _facts(conductor, why_not)
    facts["files left in /dev/shm"] = len(_files_left() - left_before)
    took_s = time.monotonic() - began
    return Result(
        seed=seed, seconds=took_s, asked_s=seconds, problem=problem, facts=facts,
        flatness=judge(conductor.members),
    )  # fmt: skip


def _facts(conductor: Conductor, why_not: str) -> dict[str, Any]:
    books = conductor.books
    ends = {f"{role}: {outcome}": count for (role, outcome), count in books.outcomes.items()}
    by_error = {}
    for (_, outcome), count in books.outcomes.items():
        by_error[outcome] = by_error.get(outcome, 0) + count
    return {
        "ticks": conductor.tick,
        "quiet points, each with a handoff from everybody to everybody": books.quiet_points,
        "handoffs": books.handoffs,
        "handoffs that arrived": sum(books.lanes.values()),
        "bytes that arrived, each compared": sum(books.lane_bytes.values()),
        "bytes compared again and again": books.checked_bytes,
        "processes": len(conductor.members),
        "kills with a restart at the same address": books.disturbed["kill"],
        "stops": books.disturbed["stop"],
        "link losses": books.disturbed["cable"] if not why_not else f"none: {why_not}",
        "suspends": books.disturbed["suspend"],
        "dropped peers": books.disturbed["drop"],
        "cancels": sum(books.cancelled_in.values()),
        "expiries": by_error.get("TicketExpired", 0),
        "deadlines": by_error.get("DeadlineExceeded", 0),
        "no room for a handoff": books.full,
        "most live handoffs of one member": books.most_live,
        "latest outcome after its deadline, ms": round(1000 * books.latest_s),
        "latest release after its outcome, ms": round(1000 * books.latest_release_s),
        "outcomes by side": ends,
        "arrived by lane": dict(books.lanes),
        "bytes by lane": dict(books.lane_bytes),
        "cancelled in state": dict(books.cancelled_in),
        "peak RSS, bytes": {
            member.name: max(used["resident"] for used in member.usages)
            for member in conductor.members
            if member.usages
        },
        "mapped more at the end than once warm": {
            f"{member.name}: {name}": more
            for member in conductor.members
            if member.elder and len(member.mapped) > 2
            for name, more in (member.mapped[-1] - member.mapped[1]).items()
        },
        "an example of each error": books.examples,
        "every rare error": {str(number): message for number, message in enumerate(books.rare[-100:])},
        "machine": {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)},
    }


def _files_left() -> set[str]:
    return {path.name for path in _LEFT_BEHIND.iterdir()}


def _told(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _yes(found: Flatness) -> str:
    return {True: "yes", False: "**NO**"}[found.is_flat]
