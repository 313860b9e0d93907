"""What is counted of handoffs, in a form that vLLM carries from its workers to its front end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvlink.engines.vllm.ledger import Ended

__all__ = ["Tally", "added", "empty_counts", "is_empty", "summary"]

Counts = dict[str, Any]


def empty_counts() -> Counts:
    """Return counts of nothing.

    ``pulls`` has one entry for each pull that succeeded: [seconds, bytes, blocks, lane, {phase: seconds}]; ``failed``
    and ``offers_failed`` count pulls and offers by the names of errors; ``offers_read`` counts offers that were read.
    """
    return {"pulls": [], "failed": {}, "offers_failed": {}, "offers_read": 0}


def is_empty(counts: Mapping[str, Any]) -> bool:
    """Whether nothing was counted."""
    return not any(counts.values())


def added(left: Mapping[str, Any], right: Mapping[str, Any]) -> Counts:
    """Return the counts of two workers, or of two times, together."""
    total = empty_counts()
    for counts in (left, right):
        total["pulls"] += counts.get("pulls", [])
        total["offers_read"] += counts.get("offers_read", 0)
        for kind in ("failed", "offers_failed"):
            for name, count in counts.get(kind, {}).items():
                total[kind][name] = total[kind].get(name, 0) + count
    return total


def summary(counts: Mapping[str, Any]) -> dict[str, int | float]:
    """Return a line for the log."""
    pulls = counts["pulls"]
    seconds = sorted(pull[0] for pull in pulls)
    moved = sum(pull[1] for pull in pulls)
    told: dict[str, int | float] = {"Pulls": len(pulls)}
    if seconds:
        told["Avg pull time (ms)"] = round(1e3 * sum(seconds) / len(seconds), 3)
        told["P90 pull time (ms)"] = round(1e3 * seconds[int(0.9 * (len(seconds) - 1))], 3)
        told["MB pulled"] = round(moved / 2**20, 3)
        told["Throughput (MB/s)"] = round(moved / 2**20 / max(sum(seconds), 1e-9), 3)
    told["Offers read"] = counts["offers_read"]
    told["Failed pulls"] = sum(counts["failed"].values())
    told["Failed offers"] = sum(counts["offers_failed"].values())
    return told


class Tally:
    """Counts what ends in one worker."""

    def __init__(self) -> None:
        self._counts = empty_counts()

    def add(self, ended: Ended, *, blocks: int = 0) -> None:
        """Count one command."""
        if ended.error is not None:
            kind = self._counts["offers_failed" if ended.sends else "failed"]
            name = type(ended.error).__name__
            kind[name] = kind.get(name, 0) + 1
        elif ended.sends:
            self._counts["offers_read"] += 1
        elif ended.outcome is not None and not ended.quiet:
            outcome = ended.outcome
            phases = {name: float(seconds) for name, seconds in outcome.phases_s.items()}
            total = phases.pop("total", 0.0)
            self._counts["pulls"].append([total, outcome.bytes, blocks, outcome.lane, phases])

    def take(self) -> Counts | None:
        """Return the counts and begin anew; ``None`` if there are none."""
        if is_empty(self._counts):
            return None
        counts, self._counts = self._counts, empty_counts()
        return counts
