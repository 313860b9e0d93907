"""Blocks of pulls that have ended while something may still write them: counted, told, and never given out by time.

The faults behave as a reliable connection over a network does: what was posted lands after the cancel, and errors
come late.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.markers import LANES, Lane, skip_unless_served
from helpers.tagged_pool import TaggedPool

from kvlink import Limits, errors
from kvlink.handoff import Pull
from kvlink.testing import FaultScript, inject_faults, remove_faults

LIMIT = 3
BLOCKS = 8
MANY = tuple(range(6))  # more than the limit
OTHERS = (6, 7)
LATE_S = 0.6
#: No cancelled transfer takes longer than `LATE_S` to drain; the rest is for a busy machine.
RELEASED_S = LATE_S + 5


class Sides:
    """A source, and a target that allows three blocks in quarantine."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        size = {"blocks": BLOCKS, "block_bytes": 256 << 10, "memory": lane.memory, "copy_threads": 1}
        self.source = TaggedPool(name="source", **size)
        self.target = TaggedPool(name="target", limits=Limits(quarantined_blocks=LIMIT), **size)
        self.hand_over((0,))  # connects

    def pull(self, blocks: tuple[int, ...], *, deadline_s: float = 20) -> Pull:
        offer = self.source.node.offer(blocks=list(blocks), num_tokens=len(blocks), ttl_s=60)
        return self.target.node.pull(offer.ticket, blocks=list(blocks), deadline_s=deadline_s, require=self.lane.lane)

    def hand_over(self, blocks: tuple[int, ...]) -> None:
        pull = self.pull(blocks).wait(timeout_s=20)
        assert pull.wait_released(timeout_s=5)
        for block in blocks:
            self.target.expect(block, self.source.tags[block])
        self.target.check()

    def quarantine(self, blocks: tuple[int, ...]) -> Pull:
        """Cancel a pull that goes on writing; later pulls go right."""
        script = FaultScript(seed=1, like_rc=True, delay_ms=1000 * LATE_S, error_after_s=LATE_S)
        inject_faults(self.target.node, script)
        pull = self.pull(blocks)
        while pull.state != "moving":
            assert not pull.wait_released(timeout_s=0.001)
        pull.cancel()
        with pytest.raises(errors.Cancelled):
            pull.wait(timeout_s=5)
        assert not pull.released
        remove_faults(self.target.node)
        return pull


@pytest.fixture(params=[lane for lane in LANES if not lane.env], ids=lambda lane: lane.id)
def sides(request: pytest.FixtureRequest) -> Iterator[Sides]:
    skip_unless_served(request.param)
    found = Sides(request.param)
    yield found
    found.source.close()
    found.target.close()


def test_a_node_takes_no_pulls_past_its_limit_and_recovers_by_itself(sides: Sides) -> None:
    node = sides.target.node
    pull = sides.quarantine(MANY)
    assert node.holds() == {"shared": 0, "exclusive": 0, "quarantined": 6, "handoffs": 0}
    assert node.state == "quarantined"
    with pytest.raises(errors.NotReady) as caught:
        sides.pull(OTHERS)
    for said in ("6 blocks of 1 pulls", "the limit is 3", "source (127.0.0.1:", "another node", "by itself"):
        assert said in str(caught.value)
    own = node.offer(blocks=list(OTHERS), num_tokens=2)  # offers are not what is refused
    own.cancel()
    with pytest.raises(errors.BlocksBusy, match="in quarantine"):
        node.offer(blocks=[MANY[0]], num_tokens=1)
    with pytest.raises(errors.DeadlineExceeded, match="6 blocks are in quarantine"):
        node.drain(deadline_s=0)
    node.resume()

    assert pull.wait_released(timeout_s=RELEASED_S)
    assert node.state == "ready"
    assert not any(node.holds().values())
    sides.target.fill(MANY, first_tag=5000)  # whatever came late has come
    sides.hand_over(OTHERS)
    sides.hand_over(MANY)


def test_a_node_within_its_limit_goes_on(sides: Sides) -> None:
    pull = sides.quarantine(MANY[:LIMIT])
    assert sides.target.node.holds()["quarantined"] == LIMIT
    assert sides.target.node.state == "ready"
    offer = sides.source.node.offer(blocks=list(OTHERS), num_tokens=2)
    sides.target.node.pull(offer.ticket, blocks=list(OTHERS), deadline_s=20).wait(timeout_s=20)
    assert pull.wait_released(timeout_s=RELEASED_S)
    assert not any(sides.target.node.holds().values())


def test_an_error_that_comes_late_ends_the_quarantine_and_the_deadline_does_not(sides: Sides) -> None:
    script = FaultScript(seed=1, like_rc=True, fail_after_bytes=1, error_after_s=LATE_S)
    inject_faults(sides.target.node, script)
    pull = sides.pull(MANY, deadline_s=0.15)
    with pytest.raises((errors.DeadlineExceeded, errors.TransportFailed)) as caught:
        pull.wait(timeout_s=5)
    if isinstance(caught.value, errors.DeadlineExceeded):  # a busy machine may see the error first
        assert not pull.released
        assert sides.target.node.state == "quarantined"
    assert pull.wait_released(timeout_s=RELEASED_S)
    remove_faults(sides.target.node)
    sides.target.fill(MANY, first_tag=6000)
    sides.hand_over(MANY)


def test_closing_a_node_ends_its_quarantine(sides: Sides) -> None:
    pull = sides.quarantine(MANY)
    sides.target.node.close(deadline_s=0)
    assert pull.released
    assert sides.target.node.state == "closed"
    sides.target.fill(MANY, first_tag=7000)
    sides.target.check(MANY)


def test_a_suspended_node_has_nothing_in_quarantine(sides: Sides) -> None:
    pull = sides.quarantine(MANY)
    node = sides.target.node
    assert not pull.released
    node.suspend(deadline_s=0)
    assert pull.released
    assert node.state == "suspended"
    sides.target.fill(MANY, first_tag=8000)
    sides.target.check(MANY)
