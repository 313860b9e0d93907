"""The exact causes for which a test may be skipped, and what each lane needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from helpers.soak import rounds

_CAP_SYS_PTRACE = 19


@dataclass(frozen=True, kw_only=True)
class Lane:
    """A lane under test: what `require` names, and the environment of both processes."""

    id: str
    lane: str
    memory: str
    env: dict[str, str] = field(default_factory=dict)
    needs_ptrace: bool = False


#: `memory` is what the lane is for; the property test draws others where a lane serves them.
LANES = (
    Lane(id="mapped", lane="mapped", memory="pool"),
    Lane(id="vectored", lane="vectored", memory="numpy", needs_ptrace=True),
    Lane(id="get", lane="get", memory="pool", needs_ptrace=True),
    Lane(id="staged", lane="staged", memory="pool"),
    Lane(id="staged-tcp", lane="staged", memory="numpy", env={"UCX_TLS": "tcp"}),
)
#: Nodes that listen beyond their host may use TCP beside shared memory.
STAGED_ANY = Lane(id="staged-any", lane="staged", memory="pool", env={"UCX_TLS": "all"})


def lanes_and_ways(first: str, *, lanes: Sequence[Lane] = LANES) -> pytest.MarkDecorator:
    """Each lane by a pull and by a push; in the short form by one of them, in turn, beginning with `first`."""
    cases = [
        pytest.param(lane, way, id=f"{lane.id}-{way}")
        for number, lane in enumerate(lanes)
        for way in ("pull", "push")
        if rounds(1, 2) == 2 or (number % 2 == 0) == (way == first)
    ]
    return pytest.mark.parametrize(("lane", "way"), cases, indirect=["lane"])


def ptrace_refusal() -> str:
    """Why a process may not read a sibling's memory here; empty if it may."""
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    if not scope.exists() or scope.read_text().strip() == "0":
        return ""
    status = Path("/proc/self/status").read_text()
    effective = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff"))
    if effective >> _CAP_SYS_PTRACE & 1:
        return ""
    return "yama's ptrace_scope keeps one process from reading another's memory"


def skip_unless_served(lane: Lane) -> None:
    """Skip where the kernel's settings forbid the lane."""
    if lane.needs_ptrace and (refusal := ptrace_refusal()):
        pytest.skip(refusal)
