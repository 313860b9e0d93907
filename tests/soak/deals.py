"""What the conductor of the soak tells its members, and what they tell it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class CancelPlan:
    """When one side calls a handoff off: once so many seconds have passed, or once its state is seen to be this."""

    after_s: float | None = None
    in_state: str | None = None


@dataclass(frozen=True, kw_only=True)
class Deal:
    """One handoff as it was drawn. `pushed`: the target reserves first. `late` ticks pass until a ticket is used."""

    number: int
    source: str
    targets: tuple[str, ...]
    lane: str | None
    num_tokens: int
    skip_tokens: int
    pushed: bool
    ttl_s: float
    deadline_s: float
    integrity: str | None
    source_cancels: CancelPlan | None
    target_cancels: CancelPlan | None
    shares_prefix: bool
    by_events: tuple[bool, bool]
    frees_early: tuple[bool, bool]
    late: int
    kept_s: float
    seed: int


@dataclass(kw_only=True)
class Ticketed:
    """A deal on its way to its target: the ticket, what the source's tokens are filled with, and since when."""

    deal: Deal
    filled_at: float
    ticket: Any
    tags: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How one side of a deal has ended, once its blocks were released."""

    number: int
    role: str
    error: str | None
    message: str = ""
    lane: str = ""
    nbytes: int = 0
    cancelled_in: str = ""
    late_s: float = 0.0
    released_after_s: float = 0.0
    suspect: bool = False


@dataclass(kw_only=True)
class Worked:
    """What a member has done since it was asked last."""

    ended: list[Ended] = field(default_factory=list)
    checked_bytes: int = 0
    full: int = 0
    most_live: int = 0
