"""One node with several peers, peers that die, and peers that come back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers.markers import LANES
from helpers.patterns import Geometry, Placement, Request
from helpers.processes import Pair, wait_until

from kvlink import errors
from kvlink.testing import Worker

GEOMETRY = Geometry()
REQUEST = Request(source_blocks=(6, 1, 4), target_blocks=(0, 7, 3), num_tokens=11)


def test_one_source_serves_several_targets_at_once(own_pair: Pair, spawn: Callable[..., Worker]) -> None:
    lane = own_pair.lane
    own_pair.open()
    other = Pair(own_pair.source, spawn(lane.env), lane)
    other.geometry, other.expected_source = own_pair.geometry, own_pair.expected_source
    placement = Placement(memory=lane.memory)
    other.expected_target = type(own_pair.expected_target).random(GEOMETRY, placement, seed=9)
    other.target.call("open", GEOMETRY, placement, seed=9)
    second = Request(source_blocks=(6, 2), target_blocks=(5, 1), num_tokens=8)

    pulls = [(own_pair, own_pair.pull(own_pair.offer(REQUEST)[1], REQUEST), REQUEST)]
    pulls.append((other, other.pull(other.offer(second)[1], second), second))

    for pair, pulled, request in pulls:
        pair.target.call("wait", pulled)
        pair.expect(request)
        pair.verify()
    assert len(own_pair.source.call("peers")) == 2


def test_one_target_pulls_from_several_sources(own_pair: Pair, spawn: Callable[..., Worker]) -> None:
    lane = own_pair.lane
    own_pair.open()
    other = Pair(spawn(lane.env), own_pair.target, lane)
    placement = Placement(memory=lane.memory)
    other.geometry, other.expected_target = own_pair.geometry, own_pair.expected_target
    other.expected_source = type(own_pair.expected_source).random(GEOMETRY, placement, seed=9)
    other.source.call("open", GEOMETRY, placement, seed=9)
    second = Request(source_blocks=(6, 2), target_blocks=(5, 1), num_tokens=8)

    first_pull = own_pair.pull(own_pair.offer(REQUEST)[1], REQUEST)
    second_pull = other.pull(other.offer(second)[1], second)
    own_pair.target.call("wait", first_pull)
    own_pair.target.call("wait", second_pull)

    own_pair.expect(REQUEST)
    other.expect(second)
    own_pair.verify()
    other.verify()


def test_a_dead_peer_fails_no_handoff_of_another(own_pair: Pair, spawn: Callable[..., Worker]) -> None:
    own_pair.open()
    doomed = spawn(own_pair.lane.env)
    doomed.call("open", GEOMETRY, Placement(memory=own_pair.lane.memory), seed=9)
    _, ticket = own_pair.offer(REQUEST)
    doomed.call("wait", doomed.call("pull", ticket, [0, 7, 3], require=own_pair.lane.lane))
    offers = [own_pair.offer(REQUEST) for _ in range(8)]
    for index, (_, ticket) in enumerate(offers):
        pulled = own_pair.pull(ticket, REQUEST)
        if index == 2:
            doomed.kill()
        own_pair.target.call("wait", pulled, timeout_s=5)
    own_pair.expect(REQUEST)
    own_pair.verify()


def test_a_restarted_source_is_reached_again_and_its_old_tickets_are_refused(
    own_pair: Pair, spawn: Callable[..., Worker]
) -> None:
    address = own_pair.open()["address"]
    own_pair.hand_over(REQUEST)
    _, old_ticket = own_pair.offer(REQUEST)
    own_pair.source.kill()

    own_pair.source = spawn(own_pair.lane.env)
    own_pair.source.call("open", GEOMETRY, own_pair.expected_source.placement, seed=2, listen=address)

    own_pair.hand_over(REQUEST)
    stale = own_pair.pull(old_ticket, REQUEST)
    with pytest.raises((errors.StalePeer, errors.PeerLost)):
        own_pair.target.call("wait", stale, timeout_s=10)
    own_pair.target.call("wait_released", stale)
    own_pair.verify()
    assert not any(own_pair.holds())


def test_a_restarted_target_pulls_again(own_pair: Pair, spawn: Callable[..., Worker]) -> None:
    own_pair.open()
    own_pair.hand_over(REQUEST)
    own_pair.target.kill()
    own_pair.target = spawn(own_pair.lane.env)
    own_pair.target.call("open", GEOMETRY, own_pair.expected_target.placement, seed=3)
    own_pair.hand_over(REQUEST)


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_dropped_peer_fails_what_is_under_way_and_may_come_back(opened: Pair, side: str) -> None:
    opened.hand_over(REQUEST)
    other = "target" if side == "source" else "source"
    offered, ticket = opened.offer(REQUEST)
    if side == "target":
        opened.source.pause()
    try:
        if side == "target":
            pulled = opened.pull(ticket, REQUEST, deadline_s=20)
        getattr(opened, side).call("drop_peer", other)
        if side == "target":
            with pytest.raises(errors.PeerLost, match="drop"):
                opened.target.call("wait", pulled)
            opened.target.call("wait_released", pulled)
    finally:
        opened.source.resume()
    opened.source.call("cancel", offered)
    opened.source.call("wait_released", offered)
    for worker in (opened.source, opened.target):
        wait_until(lambda worker=worker: not worker.call("peers"), timeout_s=5, what="both see that it has ended")
    opened.hand_over(REQUEST)
    assert not any(opened.holds())


def test_a_lane_that_cannot_serve_is_refused_instead_of_replaced(spawn: Callable[..., Worker]) -> None:
    """Memory that is no pool has no mapped lane."""
    pair = Pair(spawn(), spawn(), LANES[0])
    pair.open(source=Placement(memory="numpy"), target=Placement(memory="numpy"))
    pulled = pair.pull(pair.offer(REQUEST)[1], REQUEST, require="mapped")
    with pytest.raises(errors.LaneUnavailable, match="'mapped' is required: region 0 .* was not made by kvlink.empty"):
        pair.target.call("wait", pulled)
    pair.target.call("wait_released", pulled)
    pair.verify()
