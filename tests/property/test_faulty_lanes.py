"""Whatever a lane does to the bytes, no handoff is wrongly right, late, or released while something may still write.

Each case draws a script for `kvlink.testing.inject_faults`, runs one handoff under it between two nodes of this
process, and refills the blocks of either side the moment they are released, as an engine would.
`KVLINK_SOAK=1` runs 3,000 cases a lane in place of 100, `KVLINK_PROPERTY_SEED` says which.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import hypothesis
import pytest
from helpers.markers import LANES, Lane, skip_unless_served
from helpers.processes import wait_until
from helpers.soak import SEED, rounds
from helpers.tagged_pool import TaggedPool
from hypothesis import strategies as st

from kvlink import errors
from kvlink.testing import FaultScript, inject_faults, remove_faults

CASES_PER_LANE = rounds(60, 3000)
BLOCKS = 8
BLOCK_BYTES = 256 << 10  # so that a handoff of six has three chunks
#: A busy machine may keep the progress thread from the processor for so long; an outcome that waits for an event
#: that never comes is late by seconds.
SLACK_S = 0.3


@dataclass(frozen=True, kw_only=True)
class Case:
    script: FaultScript
    blocks: tuple[tuple[int, ...], tuple[int, ...]]
    deadline_s: float
    ttl_s: float
    cancel_after_s: float | None


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shares = st.sampled_from((0.0, 0.0, 0.2, 0.6))
    script = FaultScript(
        seed=draw(st.integers(0, 2**31 - 1)),
        delay_ms=draw(st.sampled_from((0.0, 0.0, 1.0, 4.0))),
        drop=draw(shares),
        duplicate=draw(shares),
        reorder=draw(st.booleans()),
        fail_after_bytes=draw(st.sampled_from((None, None, None, None, 1, 3 * BLOCK_BYTES))),
        no_resource=draw(st.sampled_from((0, 0, 3))),
        like_rc=draw(st.booleans()),
        error_after_s=draw(st.sampled_from((0.002, 0.015))),
    )
    count = draw(st.integers(1, 6))
    orders = st.permutations(range(BLOCKS)).map(lambda order: tuple(order[:count]))
    return Case(
        script=script,
        blocks=(draw(orders), draw(orders)),
        deadline_s=draw(st.sampled_from((0.005, 0.04, 0.04))),
        ttl_s=draw(st.sampled_from((0.003, 0.1, 0.1))),
        cancel_after_s=draw(st.sampled_from((None, None, 0.0, 0.001, 0.003))),
    )


@pytest.fixture(params=[lane for lane in LANES if not lane.env], ids=lambda lane: lane.id)
def faulty_lane(request: pytest.FixtureRequest) -> Lane:
    """The lanes that two nodes of one process with default settings have."""
    skip_unless_served(request.param)
    return request.param


HARMLESS = Case(script=FaultScript(), blocks=((0,), (1,)), deadline_s=5, ttl_s=5, cancel_after_s=None)


class Sides:
    """A source and a target in this process, and how many handoffs they must have counted."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        size = {"blocks": BLOCKS, "block_bytes": BLOCK_BYTES, "copy_threads": 1}
        self.source = TaggedPool(name="source", memory=lane.memory, **size)
        self.target = TaggedPool(name="target", memory=lane.memory, **size)
        self.tag = 1000
        self.counts: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.run(HARMLESS)  # connects: most cases have less time than that may take

    def next_tags(self) -> int:
        self.tag += BLOCKS
        return self.tag

    def run(self, case: Case) -> None:
        from_blocks, to_blocks = case.blocks
        counted = inject_faults(self.target.node, case.script)
        offer = self.source.node.offer(blocks=list(from_blocks), num_tokens=len(from_blocks), ttl_s=case.ttl_s)
        began = time.monotonic()
        pull = self.target.node.pull(
            offer.ticket, blocks=list(to_blocks), deadline_s=case.deadline_s, require=self.lane.lane
        )
        if case.cancel_after_s is not None and not pull.wait_released(timeout_s=case.cancel_after_s):
            pull.cancel()
        with contextlib.suppress(errors.KvlinkError):
            pull.wait(timeout_s=case.deadline_s + SLACK_S)
        assert pull.outcome is not None, f"no outcome by its deadline, {time.monotonic() - began:.3f} s"
        self.outcomes[type(pull.error).__name__] += 1
        if pull.outcome == "succeeded":
            for source_block, target_block in zip(from_blocks, to_blocks, strict=True):
                self.target.expect(target_block, self.source.tags[source_block])
            self.target.check(to_blocks)
        # A lane like RC tells its errors late, and a cancelled one then drains.
        assert pull.wait_released(timeout_s=2 * case.script.error_after_s + SLACK_S), case
        self.target.fill(to_blocks, first_tag=self.next_tags())
        offer.cancel()
        assert offer.wait_released(timeout_s=SLACK_S)
        self.source.fill(from_blocks, first_tag=self.next_tags())
        counts = counted.read()
        self.counts.update(counts)
        assert not (counts["dropped"] and pull.outcome == "succeeded"), "a dropped piece gave success"

    def check(self) -> None:
        self.source.check()
        self.target.check()
        for pool in (self.source, self.target):
            assert not any(pool.node.holds().values())
            counters = pool.node.counters()
            assert counters["succeeded"] + counters["failed"] == counters["offers"] + counters["pulls"]


@pytest.fixture
def sides(faulty_lane: Lane) -> Iterator[Sides]:
    found = Sides(faulty_lane)
    yield found
    found.source.close()
    found.target.close()


def settings(cases_a_lane: int) -> hypothesis.settings:
    return hypothesis.settings(
        max_examples=cases_a_lane,
        database=None,
        phases=(hypothesis.Phase.generate,),
        suppress_health_check=list(hypothesis.HealthCheck),
    )


@pytest.mark.slow
def test_no_script_makes_a_handoff_wrongly_right_late_or_released_too_early(sides: Sides) -> None:
    @hypothesis.seed(SEED)
    @settings(CASES_PER_LANE)
    @hypothesis.given(case=cases())
    def run(case: Case) -> None:
        sides.run(case)
        sides.check()

    run()
    remove_faults(sides.target.node)
    sides.run(HARMLESS)
    sides.check()
    print(f"{sides.lane.id}: KVLINK_PROPERTY_SEED={SEED}, {dict(sides.outcomes)}, {dict(sides.counts)}")
    met = {name for name, count in sides.counts.items() if count}
    assert {"dropped", "duplicated", "refused", "failed"} <= met
    assert sides.outcomes["NoneType"] > CASES_PER_LANE // 10
    assert len(sides.outcomes) > 3, "hardly anything went wrong"


def test_a_lane_that_no_cancel_stops_is_released_only_once_its_last_byte_has_landed(sides: Sides) -> None:
    late_s = 0.08
    counted = inject_faults(
        sides.target.node, FaultScript(seed=SEED, like_rc=True, delay_ms=1000 * late_s, error_after_s=late_s)
    )
    offer = sides.source.node.offer(blocks=list(range(6)), num_tokens=6, ttl_s=5)
    pull = sides.target.node.pull(offer.ticket, blocks=list(range(6)), deadline_s=5, require=sides.lane.lane)
    wait_until(lambda: pull.state == "moving", timeout_s=5, what="its bytes move")
    pull.cancel()
    with pytest.raises(errors.Cancelled):
        pull.wait(timeout_s=SLACK_S)
    assert not pull.released
    with pytest.raises(errors.BlocksBusy):
        sides.target.node.pull(offer.ticket, blocks=list(range(6)), deadline_s=5)
    assert pull.wait_released(timeout_s=2 * late_s + SLACK_S)
    sides.target.fill(range(6), first_tag=sides.next_tags())
    assert sides.lane.lane == "staged" or counted.read()["late"]
    offer.cancel()
    assert offer.wait_released(timeout_s=SLACK_S)
    sides.run(HARMLESS)
    sides.check()


def test_the_same_seed_drops_pieces_of_the_same_handoffs(sides: Sides) -> None:
    def dropped(seed: int) -> list[bool]:
        found = []
        # Many pieces a handoff, except that staged makes one or two of them.
        drop = 0.3 if sides.lane.lane == "staged" else 0.05
        counted = inject_faults(sides.target.node, FaultScript(seed=seed, drop=drop))
        for number in range(16):
            before = counted.read()["dropped"]
            offer = sides.source.node.offer(blocks=list(range(6)), num_tokens=6)
            pull = sides.target.node.pull(offer.ticket, blocks=list(range(6)), require=sides.lane.lane)
            # What has lost a piece never arrives.
            wait_until(
                lambda pull=pull, before=before: pull.outcome or counted.read()["dropped"] > before,
                timeout_s=10,
                what=f"handoff {number} arrives, or loses a piece",
            )
            found.append(counted.read()["dropped"] > before)
            for end in (pull, offer):
                end.cancel()
                assert end.wait_released(timeout_s=10)
        return found

    first = dropped(7)
    assert any(first)
    assert not all(first)
    assert dropped(7) == first
    assert dropped(8) != first
