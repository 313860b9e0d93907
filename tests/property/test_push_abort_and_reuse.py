"""Pushes that are called off at any moment, in a pool so small that every round hits the blocks of the last.

As test_abort_and_reuse.py, for pushes: nothing stray is written, nothing is kept, and what succeeded is right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers.markers import LANES, Lane
from helpers.patterns import scattered
from helpers.processes import spawn_worker
from helpers.reusing_worker import Ended
from helpers.soak import SEED, rounds
from property.test_abort_and_reuse import LEAST_MIDWAY

import kvlink
from kvlink.testing import FaultScript, Worker, WorkerFailed

PROCESS = "helpers.reusing_worker:ReusingWorker"
ROUNDS_PER_LANE = rounds(300, 10_000) // len(LANES)
BLOCKS = 6
USED = 5
BLOCK_BYTES = 256 << 10
STRETCH_S = 0.012
#: Half of the rounds have a lane that goes on after a cancel.
MOST_ROUNDS_TOO_EARLY = 40
ABORTS = ("midway", "midway", "midway", "target", "source", "expiry", "deadline", "nobody")
ENDS = {"None", "Cancelled", "TicketExpired", "DeadlineExceeded", "AlreadyClaimed"}


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[str, tuple[Worker, Worker]]]:
    """Two processes for the lanes of one environment, which end well after the last of them."""
    started: dict[str, tuple[Worker, Worker]] = {}
    yield started
    for worker in [worker for pair in started.values() for worker in pair]:
        assert worker.close() == 0, worker.stderr()


@pytest.fixture
def sides(lane: Lane, processes: dict[str, tuple[Worker, Worker]]) -> Iterator[tuple[Worker, Worker]]:
    key = str(lane.env)
    if key not in processes:
        processes[key] = (spawn_worker(PROCESS, lane.env), spawn_worker(PROCESS, lane.env))
    options = {"blocks": BLOCKS, "block_bytes": BLOCK_BYTES, "memory": lane.memory, "copy_threads": 1}
    source, target = processes[key]
    source.call("open", name="source", limits=kvlink.Limits(push_at_once_tokens=0), **options)
    target.call("open", name="target", **options)
    yield source, target
    source.call("close")
    target.call("close")


class Rounds:
    """One lane's rounds, and what must hold after each."""

    def __init__(self, source: Worker, target: Worker, lane: Lane) -> None:
        self.source, self.target, self.lane = source, target, lane
        self.rng = np.random.default_rng([SEED, LANES.index(lane)])
        self.done = self.midway = self.aborted = 0
        self.outcomes: Counter[str] = Counter()

    def run(self, abort: str, *, too_early: bool = False) -> None:
        rng = self.rng
        from_blocks, to_blocks = (scattered(rng, BLOCKS, USED) for _ in range(2))
        after_s = float(rng.triangular(0, 0.5 * STRETCH_S, STRETCH_S))
        script = FaultScript(
            seed=int(rng.integers(1 << 31)),
            delay_ms=1000 * STRETCH_S if self.done else 0,
            reorder=True,
            like_rc=bool(rng.integers(2)),
            error_after_s=STRETCH_S,
        )
        self.done += 1
        first_tag = 2 * BLOCKS * self.done + 1000
        ttl_s = after_s + 0.002 if abort == "expiry" else 30
        ticket = self.target.call(
            "reserve", to_blocks, num_tokens=USED, ttl_s=ttl_s, script=script, require=self.lane.lane
        )
        source_tags = self.source.call("tags", from_blocks)
        cuts = sorted({0, USED, *(int(cut) for cut in rng.integers(0, USED + 1, 2))})
        pieces = list(zip(cuts[:-1], cuts[1:], strict=True))
        rng.shuffle(pieces)
        self.source.start(
            "push",
            *(ticket, from_blocks),
            pieces=[(int(first), int(end)) for first, end in pieces[: int(rng.integers(0, len(pieces) + 1))]],
            gap_s=float(rng.choice([0, 0.2 * after_s])),
            cancel_after_s=after_s if abort == "source" else None,
            deadline_s=after_s + 0.002 if abort == "deadline" else 30,
            first_tag=first_tag,
        )
        taken = self.target.call(
            "finish_slot",
            source_tags=source_tags,
            cancel_after_s=self._target_cancels(abort, after_s),
            from_first_byte=abort == "midway",
            first_tag=first_tag + BLOCKS,
            too_early=too_early,
        )
        given, _ = self.source.result()
        self.check(abort, taken, given)

    def _target_cancels(self, abort: str, after_s: float) -> float | None:
        if abort == "midway":
            return 0.1 * after_s
        # A push that its source calls off before it was connected leaves the reservation as it was.
        return after_s if abort == "target" else 2 * STRETCH_S if abort in ("source", "deadline") else None

    def check(self, abort: str, taken: Ended, given: Ended) -> None:
        self.outcomes[f"{taken.error}"] += 1
        self.outcomes[f"source: {given.error}"] += 1
        words = taken.words
        if taken.error is None:
            assert words["came"] == words["all"], f"{words} after a success"
        else:
            self.aborted += 1
            self.midway += words["midway"]
        if abort == "nobody":
            assert (taken.error, given.error) == (None, None)
        if given.error is None:  # the target may have called it off while VALID was on its way
            assert words["came"] == words["all"], "the source counted a reader that had not read everything"
        for side in (taken, given):
            assert not any(side.held.values()), side.held
            assert side.counters["succeeded"] + side.counters["failed"] == self.done, side.counters
        assert given.counters["pushes"] == taken.counters["reservations"] == self.done
        assert taken.counters["protocol_errors"] == given.counters["protocol_errors"] == 0
        assert {str(taken.error), str(given.error)} <= ENDS


@pytest.mark.slow
def test_aborts_at_any_moment_leave_no_wrong_byte_and_no_hold(sides: Any, lane: Lane) -> None:
    played = Rounds(*sides, lane)
    played.run("nobody")  # connects, before the clock of any abort runs
    while played.done < ROUNDS_PER_LANE:
        played.run(str(played.rng.choice(ABORTS)))
    for worker in sides:
        worker.call("check")
    print(
        f"{lane.id}: KVLINK_PROPERTY_SEED={SEED}, {played.done} rounds, {dict(played.outcomes)}, "
        f"{played.midway} of {played.aborted} aborts between the first and the last byte"
    )
    assert played.midway >= LEAST_MIDWAY * played.aborted
    assert {"None", "Cancelled"} <= set(played.outcomes)


@pytest.mark.slow
def test_blocks_that_are_let_go_with_the_outcome_are_found_overwritten(sides: Any, lane: Lane) -> None:
    """What the test above would miss if it could not fail: the same rounds, and an engine that waits for no release."""
    played = Rounds(*sides, lane)
    played.run("nobody")

    def let_go_too_early() -> None:
        while played.done < MOST_ROUNDS_TOO_EARLY:
            played.run("midway", too_early=True)

    with pytest.raises(WorkerFailed, match=r"words of block \d are not of tag"):
        let_go_too_early()
    played.source.result()
