"""Aborts at any moment in a pool so small that every round hits the blocks of the last: nothing stray, nothing kept.

`KVLINK_SOAK=1` runs 10,000 rounds in place of 300, `KVLINK_PROPERTY_SEED` says which.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from helpers.markers import LANES, Lane
from helpers.native_programs import SANITIZE
from helpers.patterns import scattered
from helpers.processes import spawn_worker
from helpers.reusing_worker import Ended
from helpers.soak import SEED, rounds

from kvlink.testing import FaultScript, Worker, WorkerFailed

PROCESS = "helpers.reusing_worker:ReusingWorker"
ROUNDS_PER_LANE = rounds(300, 10_000) // len(LANES)
BLOCKS = 6
USED = 5
BLOCK_BYTES = 256 << 10  # five have three chunks
#: Pieces of a transfer come over such a time, and the aborts in it.
STRETCH_S = 0.012
#: Of all aborts, those between the first and the last byte. With a sanitizer, what is between two aborts takes longer.
LEAST_MIDWAY = 0.1 if SANITIZE else 0.3
#: Half of the rounds have a lane that goes on after a cancel.
MOST_ROUNDS_TOO_EARLY = 40
#: By whom. "midway" is the target, once it has seen the first byte.
ABORTS = ("midway", "midway", "midway", "target", "source", "expiry", "deadline", "nobody")


@pytest.fixture(scope="module")
def processes() -> Iterator[Callable[[Lane], tuple[Worker, Worker]]]:
    """Two processes for the lanes of one environment, which end well after the last of them."""
    started: dict[str, tuple[Worker, Worker]] = {}

    def start(lane: Lane) -> tuple[Worker, Worker]:
        key = str(lane.env)
        if key not in started:
            source, target = (spawn_worker(PROCESS, lane.env) for _ in range(2))
            started[key] = (source, target)
        return started[key]

    yield start
    for worker in [worker for pair in started.values() for worker in pair]:
        assert worker.close() == 0, worker.stderr()


@pytest.fixture
def sides(lane: Lane, processes: Callable[[Lane], tuple[Worker, Worker]]) -> Iterator[tuple[Worker, Worker]]:
    source, target = processes(lane)
    options = {"blocks": BLOCKS, "block_bytes": BLOCK_BYTES, "memory": lane.memory, "copy_threads": 1}
    source.call("open", name="source", **options)
    target.call("open", name="target", **options)
    yield source, target
    source.call("close")
    target.call("close")


class Rounds:
    """One lane's rounds, and what must hold after each."""

    def __init__(self, source: Worker, target: Worker, lane: Lane) -> None:
        self.source, self.target, self.lane = source, target, lane
        self.rng = np.random.default_rng([SEED, LANES.index(lane)])
        self.done = 0
        self.midway = 0
        self.aborted = 0
        self.outcomes: Counter[str] = Counter()

    def run(self, abort: str, *, too_early: bool = False) -> None:
        from_blocks, to_blocks = (scattered(self.rng, BLOCKS, USED) for _ in range(2))
        after_s = float(self.rng.triangular(0, 0.5 * STRETCH_S, STRETCH_S))
        # Half of the lanes go on after a cancel, as one over a network does.
        script = FaultScript(
            seed=int(self.rng.integers(1 << 31)),
            delay_ms=1000 * STRETCH_S if self.done else 0,
            reorder=True,
            like_rc=bool(self.rng.integers(2)),
            error_after_s=STRETCH_S,
        )
        self.done += 1
        tags = {"source": 2 * BLOCKS * self.done + 1000, "target": 2 * BLOCKS * self.done + 1000 + BLOCKS}
        ticket, source_tags = self.source.call(
            "offer", from_blocks, num_tokens=USED, ttl_s=after_s + 0.002 if abort == "expiry" else 30
        )
        self.target.start(
            "pull",
            *(ticket, to_blocks),
            source_tags=source_tags,
            cancel_after_s=after_s if abort == "target" else 0.1 * after_s if abort == "midway" else None,
            from_first_byte=abort == "midway",
            deadline_s=after_s + 0.002 if abort == "deadline" else 30,
            first_tag=tags["target"],
            script=script,
            too_early=too_early,
            require=self.lane.lane,
        )
        if abort in ("target", "midway", "deadline"):  # an offer outlives its reader
            taken = self.target.result()
            self.source.start("finish_offer", cancel_after_s=0.0, first_tag=tags["source"])
        else:
            cancel_after_s = after_s if abort == "source" else None
            self.source.start("finish_offer", cancel_after_s=cancel_after_s, first_tag=tags["source"])
            taken = self.target.result()
        given = self.source.result()
        self.check(abort, taken, given)

    def check(self, abort: str, taken: Ended, given: Ended) -> None:
        self.outcomes[str(taken.error)] += 1
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
        assert given.counters["offers"] == taken.counters["pulls"] == self.done
        assert taken.counters["protocol_errors"] == given.counters["protocol_errors"] == 0


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
    assert {"None", "Cancelled"} <= set(played.outcomes) <= {"None", "Cancelled", "TicketExpired", "DeadlineExceeded"}


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
