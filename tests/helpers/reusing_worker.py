"""What runs inside a worker process of the tests of abort: blocks are refilled the moment that they are released."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from helpers.tagged_pool import TaggedPool
from kvlink.errors import KvlinkError
from kvlink.testing import FaultScript, inject_faults

RELEASED_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How one side of a round ended. `words` counts what lay in the target's blocks when they were released,
    and whether the abort came between the first and the last byte: of a transfer, or of all of them."""

    error: str | None
    held: dict[str, int]
    counters: dict[str, int]
    words: Counter[str]


class ReusingWorker:
    """One side of rounds of offers, pulls and aborts in a pool with hardly more blocks than one handoff has."""

    def open(self, **options: Any) -> None:
        """Start the node."""
        self.pool = TaggedPool(**options)
        self._tag = 0

    def offer(self, blocks: Sequence[int], **options: Any) -> tuple[dict[str, Any], list[int]]:
        """Offer blocks; returns the ticket and what they are filled with."""
        self.pool.check()
        self.offered, self._blocks = self.pool.node.offer(blocks=list(blocks), **options), blocks
        return self.offered.ticket, [self.pool.tags[block] for block in blocks]

    def finish_offer(self, *, cancel_after_s: float | None, first_tag: int) -> Ended:
        """Cancel the offer at that time, or wait for its end; then refill at once."""
        if cancel_after_s is not None:
            _spin(cancel_after_s)
            self.offered.cancel()
        assert self.offered.wait_released(timeout_s=RELEASED_S), self.offered
        self.pool.fill(self._blocks, first_tag=first_tag)
        return self._ended(self.offered, Counter())

    def reserve(self, blocks: Sequence[int], *, script: FaultScript, **options: Any) -> dict[str, Any]:
        """Reserve blocks, into which bytes come as the script says; returns the ticket."""
        self.pool.check()
        self._counted = inject_faults(self.pool.node, script)
        self.reserved, self._blocks = self.pool.node.reserve(list(blocks), **options), blocks
        return self.reserved.ticket

    def finish_slot(self, **options: Any) -> Ended:
        """As `pull`, for what was reserved."""
        return self._finish(self.reserved, self._blocks, **options)

    def push(
        self,
        ticket: Any,
        blocks: Sequence[int],
        *,
        pieces: Sequence[tuple[int, int]],
        gap_s: float,
        cancel_after_s: float | None,
        first_tag: int,
        **options: Any,
    ) -> tuple[Ended, list[int]]:
        """Push: one piece after another, with so much time in between; cancel at that time if one is given.

        Refills the blocks the moment that they are released. Returns what they held, too.
        """
        self.pool.check()
        tags = [self.pool.tags[block] for block in blocks]
        handle = self.pool.node.push(ticket, list(blocks), **options)
        began = time.perf_counter()
        try:
            for first, end in pieces:
                handle.ready(tokens=range(first, end))
                _spin(gap_s)
            if cancel_after_s is None:
                handle.commit()
        except KvlinkError:
            assert handle.error is not None, handle  # it has ended meanwhile
        if cancel_after_s is not None:
            _spin(max(0.0, cancel_after_s - (time.perf_counter() - began)))
            handle.cancel()
        assert handle.wait_released(timeout_s=RELEASED_S), handle
        self.pool.fill(blocks, first_tag=first_tag)
        return self._ended(handle, Counter()), tags

    def tags(self, blocks: Sequence[int]) -> list[int]:
        """What blocks are filled with."""
        return [self.pool.tags[block] for block in blocks]

    def pull(
        self,
        ticket: Any,
        blocks: Sequence[int],
        *,
        source_tags: Sequence[int],
        cancel_after_s: float | None,
        from_first_byte: bool,
        first_tag: int,
        script: FaultScript,
        too_early: bool,
        **options: Any,
    ) -> Ended:
        """Pull, cancel at that time if one is given, look at what came once it is released, then refill at once.

        The time counts from the pull, or from when its first byte is seen. An engine that does it all `too_early`
        takes the outcome for the release.
        """
        self.pool.check()
        self._counted = inject_faults(self.pool.node, script)
        handle = self.pool.node.pull(ticket, blocks=list(blocks), **options)
        return self._finish(
            handle,
            blocks,
            source_tags=source_tags,
            cancel_after_s=cancel_after_s,
            from_first_byte=from_first_byte,
            first_tag=first_tag,
            too_early=too_early,
        )

    def _finish(
        self,
        handle: Any,
        blocks: Sequence[int],
        *,
        source_tags: Sequence[int],
        cancel_after_s: float | None,
        from_first_byte: bool,
        first_tag: int,
        too_early: bool = False,
    ) -> Ended:
        while from_first_byte and handle.outcome is None and not self.pool.touched(blocks):
            pass
        had_some = False
        if cancel_after_s is not None:
            _spin(cancel_after_s)
            had_some = handle.outcome is None and self.pool.touched(blocks)
            handle.cancel()
        while too_early and handle.outcome is None:
            pass
        assert too_early or handle.wait_released(timeout_s=RELEASED_S), handle
        words = Counter(midway=self._counted.read()["midway"])
        for block, tag in zip(blocks, source_tags, strict=True):
            words["came"] += self.pool.holding(block, tag)
            words["stayed"] += self.pool.holding(block, self.pool.tags[block])
            words["all"] += self.pool.blocks[block].size
        if had_some and words["came"] < words["all"]:  # between two pieces of a push, too
            words["midway"] = 1
        self.pool.fill(blocks, first_tag=first_tag)
        if too_early:
            assert handle.wait_released(timeout_s=RELEASED_S), handle
            self.pool.check()
        return self._ended(handle, words)

    def check(self) -> None:
        """Compare every byte with what was last put there on purpose."""
        self.pool.check()

    def close(self) -> None:
        """Close the node."""
        self.pool.close()

    def _ended(self, handle: Any, words: Counter[str]) -> Ended:
        error = handle.error
        return Ended(
            error=None if error is None else type(error).__name__,
            held=self.pool.node.holds(),
            counters=self.pool.node.counters(),
            words=words,
        )


def _spin(seconds: float) -> None:
    """Wait for less than the kernel's timers can."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass
