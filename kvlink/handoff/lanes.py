"""Which lanes two nodes that have just met could use, the best one first."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvlink.errors import ConfigError

__all__ = ["LANES", "LaneFacts", "check_lanes", "usable_lanes"]

LANES = ("mapped", "vectored", "get", "staged")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneFacts:
    """What connecting found out.

    Attributes
    ----------
    same_host
        One kernel runs both processes.
    mapped_regions
        Descriptors of all of the source's regions are here.
    readable_pid
        The source's process as this one sees it; 0 when it cannot be told.
    ucx
        Both sides have a UCX worker.
    keys
        The source gave keys for all of its regions: it allows one-sided reads.
    """

    same_host: bool
    mapped_regions: bool
    readable_pid: int
    ucx: bool
    keys: bool


def usable_lanes(facts: LaneFacts, *, allowed: Collection[str]) -> list[str]:
    """Return the lanes that `facts` and the user permit, the cheapest first.

    One mapping beats one system call for hundreds of runs, which beats one for each run.
    """
    possible = {
        "mapped": facts.same_host and facts.mapped_regions,
        "vectored": facts.same_host and facts.readable_pid > 0,
        "get": facts.ucx and facts.keys,
        "staged": facts.ucx,
    }
    return [lane for lane in LANES if possible[lane] and lane in allowed]


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
