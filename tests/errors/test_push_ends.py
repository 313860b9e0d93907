"""Whatever ends a push in its middle, at whichever side: one outcome and one release on both, and nothing is held."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.markers import LANES
from helpers.patterns import Placement, Request
from helpers.processes import Pair, wait_until
from helpers.tagged_pool import TaggedPool

import kvlink
from kvlink import errors
from kvlink.testing import FaultScript, Worker, inject_faults

PIECEWISE = kvlink.Limits(push_at_once_tokens=0)
NOTICED_S = 3.0
TOKENS = 4
SCATTERED = Request(source_blocks=(6, 1, 4), target_blocks=(0, 7, 3), num_tokens=11)


class InTheMiddle:
    """A push of four tokens, one a block, of which one has arrived, and one of which moves for a while."""

    def __init__(self, *, moving: bool, ttl_s: float = 20, deadline_s: float = 20) -> None:
        self.source = TaggedPool(name="prefill", blocks=8, block_bytes=64 << 10, limits=PIECEWISE, copy_threads=1)
        self.target = TaggedPool(name="decode", blocks=8, block_bytes=64 << 10, copy_threads=1)
        self.slot = self.target.node.reserve([0, 1, 2, 3], num_tokens=TOKENS, ttl_s=ttl_s)
        self.push = self.source.node.push(self.slot.ticket, [4, 5, 6], deadline_s=deadline_s)
        self.push.ready(tokens=range(1))
        self._until(lambda: self.target.touched([0]) and self.slot.state == "filling")
        if moving:
            inject_faults(self.target.node, FaultScript(seed=1, delay_ms=60_000, error_after_s=60.0))
            self.push.ready(tokens=range(1, 2))
            self._until(lambda: self.slot.state == "moving")

    def _until(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, timeout_s=10, what=lambda: f"{self.slot}, {self.push}")

    def both_fail(self, slot: type[Exception] | tuple[Any, ...], push: type[Exception] | tuple[Any, ...]) -> None:
        with pytest.raises(slot):
            self.slot.wait(timeout_s=NOTICED_S)
        with pytest.raises(push):
            self.push.wait(timeout_s=NOTICED_S)
        assert self.slot.wait_released(timeout_s=NOTICED_S)
        assert self.push.wait_released(timeout_s=NOTICED_S)
        assert self.slot.error is not None
        assert self.slot.error.failed
        assert self.slot.error.valid_prefix_tokens == 0
        for late in (self.push.commit, self.push.ready, lambda: self.push.add([7])):
            with pytest.raises(push):
                late()
        for pool in (self.source, self.target):
            if not pool.node.closed:
                assert not any(pool.node.holds().values())

    def close(self) -> None:
        self.target.close()
        self.source.close()


@pytest.fixture(params=[False, True], ids=["between-two-pieces", "while-one-moves"])
def middle(request: pytest.FixtureRequest) -> Iterator[InTheMiddle]:
    made = InTheMiddle(moving=request.param)
    yield made
    made.close()


def test_the_target_cancels(middle: InTheMiddle) -> None:
    middle.slot.cancel()
    middle.both_fail(errors.Cancelled, errors.Cancelled)


def test_the_source_cancels(middle: InTheMiddle) -> None:
    middle.push.cancel()
    middle.both_fail(errors.Cancelled, errors.Cancelled)


def test_a_push_that_is_cancelled_before_the_two_are_connected_ends_the_reservation_too() -> None:
    source = TaggedPool(name="prefill", blocks=8, block_bytes=64 << 10, copy_threads=1)
    target = TaggedPool(name="decode", blocks=8, block_bytes=64 << 10, copy_threads=1)
    slot = target.node.reserve([0, 1, 2, 3], num_tokens=TOKENS, ttl_s=60)
    push = source.node.push(slot.ticket, [4, 5, 6], deadline_s=60)
    assert not source.node.peers()

    push.cancel()

    with pytest.raises(errors.Cancelled):
        push.wait(timeout_s=NOTICED_S)
    with pytest.raises(errors.Cancelled, match="withdrawn"):
        slot.wait(timeout_s=NOTICED_S)
    assert slot.wait_released(timeout_s=NOTICED_S)
    assert push.wait_released(timeout_s=NOTICED_S)
    for pool in (source, target):
        assert not any(pool.node.holds().values())
        pool.close()


def test_the_target_closes(middle: InTheMiddle) -> None:
    middle.target.node.close()
    middle.both_fail(errors.Closed, (errors.Cancelled, errors.PeerLost))


def test_the_source_closes(middle: InTheMiddle) -> None:
    middle.source.node.close()
    middle.both_fail((errors.Closed, errors.PeerLost), errors.Closed)


def test_the_target_drops_the_source(middle: InTheMiddle) -> None:
    middle.target.node.drop_peer("prefill")
    middle.both_fail(errors.PeerLost, (errors.PeerLost, errors.Cancelled))


def test_the_source_drops_the_target(middle: InTheMiddle) -> None:
    middle.source.node.drop_peer("decode")
    middle.both_fail(errors.PeerLost, errors.PeerLost)


def test_the_target_is_suspended(middle: InTheMiddle) -> None:
    middle.target.node.suspend(deadline_s=0)
    middle.both_fail(errors.NotReady, (errors.Cancelled, errors.PeerLost))


def test_a_fence_that_fails_fails_the_push(middle: InTheMiddle) -> None:
    def broken() -> None:
        raise RuntimeError("the kernel has crashed")

    middle.push.ready(tokens=range(2, 3), fence=broken)
    with pytest.raises(errors.TransportFailed, match="a fence has failed: RuntimeError: the kernel has crashed"):
        middle.push.wait(timeout_s=NOTICED_S)
    middle.both_fail(errors.TransportFailed, errors.TransportFailed)


@pytest.mark.parametrize("late", ["slot", "push"])
def test_time_runs_out_at_one_side(late: str) -> None:
    made = InTheMiddle(moving=False, **{"ttl_s" if late == "slot" else "deadline_s": 0.3})
    try:
        if late == "slot":
            made.both_fail(errors.DeadlineExceeded, errors.Cancelled)
        else:
            made.both_fail(errors.DeadlineExceeded, errors.DeadlineExceeded)
    finally:
        made.close()


def test_what_waits_for_a_fence_does_not_move_and_keeps_the_commit_waiting() -> None:
    made = InTheMiddle(moving=False)
    gate = threading.Event()

    class Event:
        def synchronize(self) -> None:
            assert gate.wait(timeout=10)

    try:
        made.push.add([7])
        made.push.ready(tokens=range(1, 2), fence=Event())
        made.push.ready(tokens=range(2, 3))
        made.push.commit(b"all")
        wait_until(lambda: made.target.touched([2]), timeout_s=5, what="what was ready did not move")
        assert not made.target.touched([1])
        assert made.slot.outcome is None
        gate.set()
        assert made.slot.wait(timeout_s=10).payload == b"all"
        made.push.wait(timeout_s=10)
        assert [made.target.holding(i, made.source.tags[4 + i]) for i in range(4)] == [16 << 10] * 4
    finally:
        made.close()


@pytest.fixture(params=[LANES[0], LANES[4]], ids=["mapped", "staged-tcp"])
def doomed(request: pytest.FixtureRequest, spawn: Callable[..., Worker]) -> Pair:
    lane = request.param
    pair = Pair(spawn(lane.env), spawn(lane.env), lane)
    pair.open(limits=PIECEWISE)
    pair.push_over(SCATTERED, ("commit", {}))
    return pair


def begin(pair: Pair) -> tuple[int, int]:
    reserved, ticket = pair.reserve(SCATTERED, ttl_s=20)
    pushed = pair.push(ticket, SCATTERED, ("ready", {"layers": ["layers.0"]}))
    wait_until(
        lambda: pair.target.call("snapshot", reserved).state == "filling", timeout_s=10, what="the push did not begin"
    )
    return reserved, pushed


def test_a_source_that_is_killed_fails_the_reservation_and_another_one_pushes(
    doomed: Pair, spawn: Callable[..., Worker]
) -> None:
    reserved, _ = begin(doomed)
    doomed.source.kill()
    with pytest.raises(errors.PeerLost):
        doomed.target.call("wait", reserved, timeout_s=NOTICED_S)
    doomed.target.call("wait_released", reserved, timeout_s=NOTICED_S)
    assert not any(doomed.target.call("holds").values())
    doomed.source = spawn(doomed.lane.env)
    doomed.source.call("open", doomed.geometry, Placement(memory=doomed.lane.memory), seed=2, name="source")
    again, ticket = doomed.reserve(SCATTERED)
    pushed = doomed.push(ticket, SCATTERED, ("commit", {}))
    doomed.target.call("wait", again)
    doomed.source.call("wait", pushed)


def test_a_target_that_is_killed_fails_the_push(doomed: Pair, spawn: Callable[..., Worker]) -> None:
    _, pushed = begin(doomed)
    doomed.target.kill()
    with pytest.raises(errors.PeerLost):
        doomed.source.call("wait", pushed, timeout_s=NOTICED_S)
    doomed.source.call("wait_released", pushed, timeout_s=NOTICED_S)
    assert not any(doomed.source.call("holds").values())
    doomed.target = spawn(doomed.lane.env)
    doomed.target.call("open", doomed.geometry, Placement(memory=doomed.lane.memory), seed=3, name="target")
    reserved, ticket = doomed.reserve(SCATTERED)
    again = doomed.push(ticket, SCATTERED, ("commit", {}))
    doomed.target.call("wait", reserved)
    doomed.source.call("wait", again)


def test_a_source_that_is_stopped_lets_the_reservation_end_by_its_own_time(
    doomed: Pair, signals: Callable[[int, int], None]
) -> None:
    reserved, ticket = doomed.reserve(SCATTERED, ttl_s=0.3)
    pushed = doomed.push(ticket, SCATTERED, ("ready", {"layers": ["layers.0"]}))
    signals(doomed.source.pid, signal.SIGSTOP)
    with pytest.raises(errors.DeadlineExceeded):
        doomed.target.call("wait", reserved, timeout_s=NOTICED_S)
    doomed.target.call("wait_released", reserved, timeout_s=NOTICED_S)
    assert not any(doomed.target.call("holds").values())
    signals(doomed.source.pid, signal.SIGCONT)
    said = doomed.source.call("wait_released", pushed, timeout_s=NOTICED_S)
    assert said.error in ("Cancelled", "TicketExpired")


@pytest.fixture
def signals() -> Iterator[Callable[[int, int], None]]:
    import os

    stopped: set[int] = set()

    def send(pid: int, signum: int) -> None:
        os.kill(pid, signum)
        (stopped.add if signum == signal.SIGSTOP else stopped.discard)(pid)

    yield send
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
