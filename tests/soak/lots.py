"""One side of a handoff in a member of the soak, by handle or by the engine's commands and events."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import kvlink
from kvlink import commands
from soak.deals import CancelPlan, Deal


class Lot:
    """What a member keeps of one handoff until its blocks are free again. Has what a `kvlink.BlockPool` asks for."""

    def __init__(
        self,
        deal: Deal,
        role: str,
        blocks: Sequence[int],
        *,
        cancels: CancelPlan | None,
        frees_early: bool,
        lasts_s: float,
    ) -> None:
        self.deal, self.role, self.blocks = deal, role, list(blocks)
        self.cancels, self.frees_early = cancels, frees_early
        self.tags = np.empty(0, np.uint32)
        self.filled_at = 0.0
        self.suspect = False
        self.handle: Any = None
        self.command_id = ""
        self.events: list[Any] = []
        self.began = time.monotonic()
        self.ends_at = self.began + lasts_s
        self.outcome_at: float | None = None
        self.late_s = 0.0
        self.cancelled_in = ""
        self.freed = self.must_fail = False
        self.steps: list[tuple[str, dict[str, Any]]] = []

    @property
    def is_target(self) -> bool:
        """Whether bytes come into the blocks."""
        return self.role in ("pull", "slot")

    def may_have_lapsed(self, now: float) -> bool:
        """Whether the source may have let go, and used its blocks again, while the target read them and their sums.

        Then the two differ, and the target says so before it hears that the lease was over.
        """
        lasts_s = self.deal.deadline_s if self.deal.pushed else self.deal.ttl_s
        return now - self.filled_at >= lasts_s or self.deal.source_cancels is not None

    @property
    def outcome(self) -> str | None:
        """As of a handle."""
        if self.handle is not None:
            return self.handle.outcome
        if not self.events:
            return None
        return "succeeded" if self.events[0].error is None else "failed"

    @property
    def released(self) -> bool:
        """As of a handle."""
        return self.handle.released if self.handle is not None else len(self.events) == 2

    @property
    def error(self) -> kvlink.KvlinkError | None:
        """As of a handle."""
        return self.handle.error if self.handle is not None else self.events[0].error

    @property
    def payload(self) -> bytes:
        """Of a success."""
        return self.handle.payload if self.handle is not None else self.events[0].payload

    @property
    def lane(self) -> str:
        """On which the bytes came."""
        return getattr(self.handle, "lane", "") if self.handle is not None else self.events[0].lane

    @property
    def nbytes(self) -> int:
        """How many came."""
        return getattr(self.handle, "bytes", 0) if self.handle is not None else self.events[0].bytes

    def add_event(self, event: Any) -> None:
        """Take one that belongs here: an outcome, then a release, each once."""
        expected = ("outcome", "released")[len(self.events)] if len(self.events) < 2 else "nothing"
        assert event.kind == expected, f"deal {self.deal.number}, {self.role}: {event.kind} where {expected} was due"
        self.events.append(event)

    def maybe_cancel(self, node: kvlink.Node, now: float) -> None:
        """Call it off if it is time for that."""
        if self.cancels is None or self.cancelled_in:
            return
        state = self.handle.state if self.handle is not None else "submitted"
        if self.cancels.in_state == state or (
            self.cancels.after_s is not None and now >= self.began + self.cancels.after_s
        ):
            self.cancelled_in = state
            if self.handle is not None:
                self.handle.cancel()
            else:
                node.submit([commands.Cancel(self.command_id)])

    def step(self) -> None:
        """Say the next thing of a push."""
        if not self.steps:
            return
        method, options = self.steps.pop(0)
        try:
            getattr(self.handle, method)(**options)
        except kvlink.KvlinkError:
            self.steps, self.must_fail = [], True  # it has ended, or is about to


def push_steps(
    deal: Deal, blocks: Sequence[int], layers: Sequence[str], given: int
) -> list[tuple[str, dict[str, Any]]]:
    """What is said of a push one after another: blocks in two portions, some layers and tokens ready, the commit."""
    rng = np.random.default_rng(deal.seed)
    steps: list[tuple[str, dict[str, Any]]] = []
    if given < len(blocks):
        steps.append(("add", {"blocks": list(blocks[given:])}))
    cut = int(rng.integers(0, deal.num_tokens + 1))
    if cut and rng.random() < 0.5:
        steps.append(("ready", {"tokens": range(cut)}))
        if rng.random() < 0.5 and cut < deal.num_tokens:
            steps.append(("ready", {"tokens": range(cut, deal.num_tokens), "layers": [str(rng.choice(layers))]}))
    elif rng.random() < 0.5:
        steps.append(("ready", {"layers": [str(rng.choice(layers))]}))
    steps.append(("commit", {"payload": str(deal.number).encode()}))
    return steps
