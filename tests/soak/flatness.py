"""Whether what a process uses stays what it was once it was warm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from soak.towns import Resident

#: Fewer quiet points tell nothing of a trend.
LEAST_POINTS = 4
#: What the allocators of C, Python and UCX may still take once warm, for each hour of load and to begin with.
RESIDENT_SLACK = 8 << 20
#: At most so many are kept to one peer and by one peer, and come and go.
QUESTIONS_SLACK = 8


@dataclass(frozen=True, kw_only=True)
class Flatness:
    """One number of one process that was never killed: the most of its warm-up, and the least of its end.

    Warm-up and end are a quarter of the quiet points each. What leaks grows and never falls, so its least value of the
    end lies above everything of the warm-up; what merely goes up and down does not. The warm-up of resident memory is
    the first half, since what allocators and UCX ever take depends on the most that happened at the same time, and that
    may come late; there may be `RESIDENT_SLACK` more.
    """

    member: str
    what: str
    warm: int
    end: int
    slack: int
    points: list[int]

    @property
    def is_flat(self) -> bool:
        """The verdict."""
        return self.end <= self.warm + self.slack

    def as_dict(self) -> dict[str, Any]:
        """For the JSON report."""
        return {**asdict(self), "is_flat": self.is_flat}


def judge(members: Sequence[Resident]) -> list[Flatness]:
    """Look at every process that has lived through the whole soak."""
    found = []
    for member in members:
        if not member.elder or len(member.usages) < LEAST_POINTS:
            continue
        half, quarter = max(1, len(member.usages) // 2), max(1, len(member.usages) // 4)
        for what in member.usages[0]:
            points = [used[what] for used in member.usages]
            # The first point is a process in which nothing has ever happened.
            warm, end = points[1 : 1 + (half if what == "resident" else quarter)], points[-quarter:]
            slack = {"resident": RESIDENT_SLACK, "connections for questions": QUESTIONS_SLACK}.get(what, 0)
            found.append(
                Flatness(
                    member=member.name,
                    what=what,
                    points=points,
                    slack=slack,
                    warm=max(warm),
                    end=min(end),
                )
            )
    return found
