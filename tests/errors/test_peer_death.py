"""A peer that is killed or closed in the middle of a pull, on each lane and on either side."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest
from helpers.patterns import Placement, Request
from helpers.processes import Pair

from kvlink import errors
from kvlink.testing import Worker, WorkerFailed

BLOCKS = 64  # of 2 MiB: ten milliseconds or more on the fastest lane with one copy thread
EVERYTHING = Request(source_blocks=tuple(range(BLOCKS)), target_blocks=tuple(range(BLOCKS)), num_tokens=4 * BLOCKS)
ONE_BLOCK = Request(source_blocks=(5,), target_blocks=(9,), num_tokens=4)

#: A death is noticed by an end of file, so far sooner than any deadline here.
NOTICED_S = 3.0


@pytest.fixture
def large(pair: Pair) -> Pair:
    """A connected pair whose transfer of everything can be caught in the middle."""
    pair.open_large(BLOCKS)
    hand_over_one_block(pair)
    return pair


@pytest.fixture
def doomed(own_pair: Pair) -> Pair:
    """The same with processes of the test's own, one of which it kills."""
    own_pair.open_large(BLOCKS)
    hand_over_one_block(own_pair)
    return own_pair


def hand_over_one_block(pair: Pair) -> None:
    offered, ticket = pair.offer(ONE_BLOCK)
    pulled = pair.pull(ticket, ONE_BLOCK)
    pair.target.call("wait", pulled)
    pair.target.call("wait_released", pulled)
    pair.source.call("wait_released", offered)
    pair.assert_equal_blocks(ONE_BLOCK)


def assert_nothing_held(worker: Worker) -> None:
    assert not any(worker.call("holds").values())


def test_a_source_killed_in_the_middle_of_a_pull_fails_it_typed(doomed: Pair, spawn: Callable[..., Worker]) -> None:
    _, ticket = doomed.offer(EVERYTHING)
    pulled = doomed.pull(ticket, EVERYTHING, deadline_s=20)
    state = doomed.target.call("signal_when_moving", pulled, pid=doomed.source.pid, signum=signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises((errors.PeerLost, errors.TransportFailed)) as caught:
        doomed.target.call("wait", pulled)
    assert state == "moving"
    assert time.monotonic() - began < NOTICED_S
    assert caught.value.failed
    assert caught.value.valid_prefix_tokens < EVERYTHING.num_tokens
    doomed.target.call("wait_released", pulled, timeout_s=NOTICED_S)
    assert_nothing_held(doomed.target)

    doomed.source.kill()
    doomed.source = spawn(doomed.lane.env)
    doomed.source.call("open", doomed.geometry, Placement(num_blocks=16, memory=doomed.lane.memory), seed=7)
    hand_over_one_block(doomed)


def test_a_target_killed_in_the_middle_of_a_pull_frees_the_offer(doomed: Pair, spawn: Callable[..., Worker]) -> None:
    offered, ticket = doomed.offer(EVERYTHING, ttl_s=2)
    pulled = doomed.pull(ticket, EVERYTHING, deadline_s=20)
    with pytest.raises(WorkerFailed, match="ended with -9"):
        doomed.target.call("signal_when_moving", pulled, pid=doomed.target.pid, signum=signal.SIGKILL)

    doomed.target = spawn(doomed.lane.env)
    doomed.target.call("open", doomed.geometry, Placement(num_blocks=16, memory=doomed.lane.memory), seed=7)
    hand_over_one_block(doomed)

    said = doomed.source.call("wait_released", offered, timeout_s=2 + NOTICED_S)
    assert said.error in ("PeerLost", "TicketExpired")
    assert_nothing_held(doomed.source)


def test_a_cancel_in_the_middle_of_a_pull_ends_both_sides(large: Pair) -> None:
    offered, ticket = large.offer(EVERYTHING, ttl_s=20)
    pulled = large.pull(ticket, EVERYTHING, deadline_s=20)
    large.target.call("cancel_when_moving", pulled)
    with pytest.raises(errors.Cancelled):
        large.target.call("wait", pulled, timeout_s=NOTICED_S)
    large.target.call("wait_released", pulled, timeout_s=NOTICED_S)
    assert_nothing_held(large.target)
    large.source.call("cancel", offered)
    large.source.call("wait_released", offered, timeout_s=NOTICED_S)
    assert_nothing_held(large.source)
    hand_over_one_block(large)


def test_an_offer_cancelled_in_the_middle_of_a_pull_never_succeeds(large: Pair) -> None:
    offered, ticket = large.offer(EVERYTHING, ttl_s=20)
    pulled = large.pull(ticket, EVERYTHING, deadline_s=20)
    large.target.call("signal_when_moving", pulled, pid=large.target.pid, signum=0)
    large.source.call("cancel", offered)
    large.source.call("wait_released", offered, timeout_s=NOTICED_S)
    large.source.call("fill", seed=8)
    with pytest.raises((errors.Cancelled, errors.UnknownHandoff)):
        large.target.call("wait", pulled)
    large.target.call("wait_released", pulled, timeout_s=NOTICED_S)
    assert_nothing_held(large.target)
    assert_nothing_held(large.source)


def test_a_source_closed_in_the_middle_of_a_pull_fails_it_typed(large: Pair) -> None:
    offered, ticket = large.offer(EVERYTHING, ttl_s=20)
    pulled = large.pull(ticket, EVERYTHING, deadline_s=20)
    assert large.target.call("signal_when_moving", pulled, pid=large.target.pid, signum=0) == "moving"
    large.source.call("close_node")
    assert large.source.call("wait_released", offered, timeout_s=NOTICED_S).error in ("Closed", None)
    said = large.target.call("wait_released", pulled, timeout_s=NOTICED_S)
    assert said.error in ("PeerLost", "Closed", "Cancelled", None)
    if said.error is None:  # the last byte came before the close
        large.assert_equal_blocks(EVERYTHING)
    assert_nothing_held(large.target)


def test_a_target_closed_in_the_middle_of_a_pull_lets_go_of_both_sides(large: Pair) -> None:
    offered, ticket = large.offer(EVERYTHING, ttl_s=2)
    pulled = large.pull(ticket, EVERYTHING, deadline_s=20)
    large.target.call("close_when_moving", pulled)
    assert large.target.call("wait_released", pulled, timeout_s=NOTICED_S).error == "Closed"
    large.source.call("wait_released", offered, timeout_s=2 + NOTICED_S)
    assert_nothing_held(large.source)
