"""What happens in each tick of the soak, drawn from its seed and its number: the same seed, the same choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvlink.testing import FaultScript
from soak.deals import CancelPlan, Deal
from soak.towns import Resident, pairs

#: States of handles, in which they are called off as soon as they are seen there.
STATES = (
    "connecting", "claiming", "waiting", "moving", "checking", "confirming", "offered", "granted", "reserved",
    "filling", "submitted",
)  # fmt: skip
MOST_TOKENS = 40
_STRETCH_S = 0.01

#: Of all ticks, those in which it happens to some member or to the cable.
CHANCES = {"kill": 0.025, "stop": 0.03, "cable": 0.015, "suspend": 0.01, "drop": 0.01}


@dataclass(frozen=True, kw_only=True)
class Disturbance:
    """What happens to whom, once the tick has worked for `after_s`; it lasts so many ticks."""

    kind: str
    whom: str
    after_s: float
    ticks: int
    other: str = ""


@dataclass(frozen=True, kw_only=True)
class Tick:
    """All that was drawn for one."""

    deals: tuple[Deal, ...]
    scripts: dict[str, FaultScript | None]
    disturbance: Disturbance | None
    work_s: float


def draw_tick(seed: int, number: int, members: Sequence[Resident], *, first_deal: int) -> Tick:
    """Draw one tick over all members, whoever of them is there at the moment."""
    rng = np.random.default_rng([seed, number])
    possible = pairs(list(members))
    deals = tuple(
        _deal(rng, first_deal + index, *possible[int(rng.integers(len(possible)))], members)
        for index in range(int(rng.integers(2, 11)))
    )
    scripts = {
        member.name: _script(rng, checked="integrity" in member.options) for member in members if rng.random() < 0.3
    }
    return Tick(
        deals=deals,
        scripts=scripts,
        disturbance=_disturbance(rng, members),
        work_s=float(rng.choice([0.002, 0.01, 0.03])),
    )


def roll_call(members: Sequence[Resident], *, first_deal: int) -> list[Deal]:
    """One handoff from every source to every target, which nothing disturbs: each has to succeed."""
    return [
        Deal(
            number=first_deal + index, source=source.name, targets=(target.name,), lane=None, num_tokens=9,
            skip_tokens=0, pushed=index % 3 == 0, ttl_s=20.0, deadline_s=20.0, integrity=None, source_cancels=None,
            target_cancels=None, shares_prefix=False, by_events=(False, False), frees_early=(False, False), late=0,
            kept_s=0.0, seed=index,
        )
        for index, (source, target) in enumerate(pairs(list(members)))
    ]  # fmt: skip


def _deal(
    rng: np.random.Generator, number: int, source: Resident, target: Resident, members: Sequence[Resident]
) -> Deal:
    pushed = bool(rng.random() < 0.35)
    targets = [target.name]
    if not pushed and rng.random() < 0.2:  # two readers of one offer
        others = [other.name for giver, other in pairs(list(members)) if giver is source and other is not target]
        targets += [str(rng.choice(others))] if others else []
    num_tokens = int(
        rng.choice([0, 1, int(rng.integers(1, 17)), int(rng.integers(1, MOST_TOKENS + 1))], p=[0.02, 0.08, 0.6, 0.3])
    )
    skips = rng.random() < 0.2
    short = rng.random() < 0.15
    integrity = None if rng.random() < 0.8 else str(rng.choice(["crc32c", "xxh3"]))
    return Deal(
        number=number,
        source=source.name,
        targets=tuple(targets),
        lane=source.lanes[int(rng.integers(len(source.lanes)))],
        num_tokens=num_tokens,
        skip_tokens=int(rng.integers(0, num_tokens + 1)) if skips else 0,
        pushed=pushed,
        ttl_s=float(rng.uniform(0.002, 0.02) if short else rng.uniform(0.5, 3.0)),
        deadline_s=float(rng.uniform(0.002, 0.02) if rng.random() < 0.1 else rng.uniform(0.5, 3.0)),
        integrity=integrity,
        source_cancels=_cancel(rng) if rng.random() < 0.12 else None,
        target_cancels=_cancel(rng) if rng.random() < 0.2 else None,
        shares_prefix=bool(rng.random() < 0.25),
        by_events=(bool(rng.random() < 0.4), bool(rng.random() < 0.4)),
        frees_early=(bool(rng.random() < 0.3), bool(rng.random() < 0.3)),
        late=int(rng.integers(1, 12)) if rng.random() < 0.08 else 0,
        kept_s=float(rng.choice([0.0, 0.02, 0.1])),
        seed=int(rng.integers(1 << 31)),
    )


def _cancel(rng: np.random.Generator) -> CancelPlan:
    if rng.random() < 0.5:
        return CancelPlan(in_state=str(rng.choice(STATES)))
    return CancelPlan(after_s=float(rng.choice([0.0, rng.uniform(0, 0.003), rng.uniform(0, 2 * _STRETCH_S)])))


def _script(rng: np.random.Generator, *, checked: bool) -> FaultScript | None:
    """Lanes that stretch, reorder, repeat, lose and refuse; bits turn over only where both sides have checksums."""
    if rng.random() < 0.3:
        return None
    return FaultScript(
        seed=int(rng.integers(1 << 31)),
        delay_ms=float(rng.choice([0.0, 1.0, 1000 * _STRETCH_S])),
        drop=float(rng.choice([0.0, 0.0, 0.0, 0.05])),
        duplicate=float(rng.choice([0.0, 0.0, 0.2])),
        corrupt=float(rng.choice([0.0, 0.1])) if checked else 0.0,
        reorder=bool(rng.random() < 0.5),
        fail_after_bytes=int(rng.integers(1, 1 << 18)) if rng.random() < 0.05 else None,
        no_resource=int(rng.choice([0, 0, 3])),
        like_rc=bool(rng.random() < 0.4),
        error_after_s=_STRETCH_S,
    )


def _disturbance(rng: np.random.Generator, members: Sequence[Resident]) -> Disturbance | None:
    drawn = float(rng.random())
    kind = ""
    for name, chance in CHANCES.items():
        if 0 <= drawn < chance:
            kind = name
        drawn -= chance
    if not kind:
        return None
    able = [member for member in members if not (kind == "kill" and member.elder)]
    if kind == "cable":
        able = [member for member in members if member.host is not None] or able
        kind = kind if able[0].host is not None else "stop"
    whom = able[int(rng.integers(len(able)))]
    neighbours = [member.name for member in members if member.town == whom.town and member is not whom]
    return Disturbance(
        kind=kind,
        whom=whom.name,
        after_s=float(rng.uniform(0, 0.01)),
        ticks=int(rng.integers(1, 25)),
        other=str(rng.choice(neighbours)),
    )
