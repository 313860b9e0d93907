"""Which lanes lead from one source to this node, and which of them is fastest for what it delivers.

The estimate is a line for each lane: nanoseconds a run, plus nanoseconds a byte. Only the order that
it gives matters. How many threads copy hardly changes that: ``mapped``, ``vectored`` and both ends
of ``staged`` use them all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from kvlink.errors import ConfigError

__all__ = ["LANES", "LaneChoice", "LaneCost", "LaneFacts", "check_lanes", "choose_lanes"]

LANES = ("mapped", "vectored", "get", "staged")


@dataclass(frozen=True, slots=True)
class LaneCost:
    """What a lane costs on one thread, beside what a network takes."""

    run_ns: float
    byte_ns: float

    def gbps(self, run_bytes: float) -> float:
        """Return the bytes a nanosecond, which are GB/s, of runs of `run_bytes`."""
        return run_bytes / (self.run_ns + self.byte_ns * run_bytes)


# Measured together on two busy cores (AMD EPYC, UCX 1.22): one thread a side, head slices of scattered
# 16-token blocks, runs of 128 bytes to 64 KiB. `mapped` is one copy with non-temporal stores. `vectored`
# has the kernel pin each page that it reads. `get` makes one call for each run, and posts it through UCX.
# `staged` copies four times: it gathers, goes into and out of shared memory, and scatters.
SAME_HOST = MappingProxyType(
    {
        "mapped": LaneCost(run_ns=50, byte_ns=0.23),
        "vectored": LaneCost(run_ns=850, byte_ns=0.30),
        "get": LaneCost(run_ns=3500, byte_ns=0.35),
        "staged": LaneCost(run_ns=30, byte_ns=2.0),
    }
)
# Between hosts the wire costs both lanes the same and is left out. `get` posts each run; `staged` copies
# twice more. Not measured: from the cost of a post and of a memcpy.
BETWEEN_HOSTS = MappingProxyType(
    {
        "get": LaneCost(run_ns=1000, byte_ns=0.0),
        "staged": LaneCost(run_ns=100, byte_ns=0.4),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneFacts:
    """What connecting found out.

    Attributes
    ----------
    same_host
        One kernel runs both processes, in one network namespace.
    mapped_regions
        Descriptors of all of the source's regions are here: they are pools of ``kvlink.empty``.
    readable_pid
        The source's process as this one sees it; 0 when it cannot be told.
    ucx
        Both sides have a UCX worker.
    keys
        The source gave keys for all of its regions: it allows one-sided reads.
    run_bytes
        Bytes that lie together on both sides, on average over the template; 0 when it moves none.
    """

    same_host: bool
    mapped_regions: bool
    readable_pid: int
    ucx: bool
    keys: bool
    run_bytes: float


@dataclass(frozen=True, slots=True)
class LaneChoice:
    """Lanes, the fastest first, and why; ``reason`` is for people, logs and ``Node.peers``."""

    lanes: tuple[str, ...]
    reason: str

    def among(self, usable: Collection[str]) -> LaneChoice:
        """Return the choice with only those lanes that opening them has left."""
        left = tuple(lane for lane in self.lanes if lane in usable)
        if left == self.lanes:
            return self
        lost = ", ".join(lane for lane in self.lanes if lane not in left)
        return LaneChoice(left, f"{left[0] if left else 'none'}, since opening {lost} failed; {self.reason}")


def choose_lanes(facts: LaneFacts, *, allowed: Collection[str]) -> LaneChoice:
    """Return the lanes that `facts` and the user permit, by their estimated speed.

    Decided once for a source, its kind of memory and a template. A lane that is required is taken
    wherever it stands in the list.
    """
    why_not = _impossible(facts)
    why_not.update({lane: "not allowed by lanes=" for lane in LANES if lane not in allowed and lane not in why_not})
    costs = SAME_HOST if facts.same_host else BETWEEN_HOSTS
    possible = [lane for lane in LANES if lane not in why_not]
    if facts.run_bytes:
        possible.sort(key=lambda lane: -costs[lane].gbps(facts.run_bytes))
    return LaneChoice(tuple(possible), _reason(facts, costs, possible, why_not))


def check_lanes(lanes: Sequence[str] | None) -> tuple[str, ...]:
    """Return the lanes that the user allows a node to use: all, unless some are named.

    Raises
    ------
    ConfigError
        If one is unknown, or the list is empty.
    """
    if lanes is None:
        return LANES
    chosen = (lanes,) if isinstance(lanes, str) else tuple(lanes)
    unknown = [lane for lane in chosen if lane not in LANES]
    if unknown or not chosen:
        raise ConfigError(f"lanes={list(chosen)}: choose from {', '.join(LANES)}")
    return chosen


def _impossible(facts: LaneFacts) -> dict[str, str]:
    """Return why each lane that cannot be had cannot."""
    why_not = {}
    if not facts.same_host:
        why_not["mapped"] = why_not["vectored"] = "the source is on another host, or in another network namespace"
    else:
        if not facts.mapped_regions:
            why_not["mapped"] = "not all of the source's memory is pools"
        if facts.readable_pid <= 0:
            why_not["vectored"] = "the source's process is not visible"
    if not facts.ucx:
        why_not["get"] = why_not["staged"] = "UCX is not used by both sides"
    elif not facts.keys:
        why_not["get"] = "the source gave no remote keys"
    return why_not


def _reason(
    facts: LaneFacts,
    costs: Mapping[str, LaneCost],
    possible: Sequence[str],
    why_not: dict[str, str],
) -> str:
    memory = "pools" if facts.mapped_regions else "foreign memory"
    where = "on this host" if facts.same_host else "on another host"
    parts = [f"{possible[0] if possible else 'no lane'} from {memory} {where}"]
    if facts.run_bytes and possible:
        speeds = ", ".join(f"{lane} {costs[lane].gbps(facts.run_bytes):.1f}" for lane in possible)
        parts.append(f"estimated GB/s for runs of {facts.run_bytes:.0f} bytes on one thread: {speeds}")
    elif not facts.run_bytes:
        parts.append("nothing to move")
    parts += [f"{lane}: {why}" for lane, why in sorted(why_not.items())]
    return "; ".join(parts)
