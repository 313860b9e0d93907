"""The interpreter's lock, and forks."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import pytest
from helpers.patterns import Geometry, Placement, Request
from helpers.processes import Pair, spawn_worker
from helpers.soak import rounds

from kvlink.errors import DeadlineExceeded, PeerLost, TicketExpired
from kvlink.testing import Worker

REQUEST = Request(source_blocks=(6, 1, 4), target_blocks=(0, 7, 3), num_tokens=11)
HELD_S = 2.0
NOTICED_S = 3.0


def test_a_source_whose_interpreter_is_blocked_serves_a_running_handoff(pair: Pair) -> None:
    pair.open()
    pair.hand_over(REQUEST)  # connecting is Python's work; what runs later is not
    offers = [pair.offer(REQUEST, ttl_s=30) for _ in range(3)]
    pair.source.start("hold_gil", HELD_S)
    began = time.monotonic()
    for _, ticket in offers:
        pair.target.call("wait", pair.pull(ticket, REQUEST, deadline_s=HELD_S), timeout_s=HELD_S)
    ended = time.monotonic()
    held_from, held_until = pair.source.result()
    pair.verify()
    assert ended < held_until, "the handoffs ended only when the interpreter was free again"
    assert held_from < ended
    assert ended - began < HELD_S
    for offered, _ in offers:
        pair.source.call("wait_released", offered, timeout_s=1)


def test_a_target_whose_interpreter_is_blocked_is_pushed_to(pair: Pair) -> None:
    pair.open()
    pair.push_over(REQUEST, ("commit", {}))  # connecting is Python's work
    reserved, ticket = pair.reserve(REQUEST)
    pair.target.start("hold_gil", HELD_S / 4)
    pushed = pair.push(ticket, REQUEST, ("commit", {}))
    pair.source.call("wait", pushed, timeout_s=HELD_S)
    ended = time.monotonic()
    _, held_until = pair.target.result()
    assert ended < held_until, "the push ended only when the interpreter was free again"
    pair.target.call("wait", reserved, timeout_s=1)
    pair.verify()


def test_a_lease_ends_on_time_though_the_interpreter_is_blocked(pair: Pair) -> None:
    pair.open()
    pair.hand_over(REQUEST)
    offered, ticket = pair.offer(REQUEST, ttl_s=0.2)
    pair.source.start("hold_gil", 1.0)
    pulled = pair.pull(ticket, REQUEST, deadline_s=5)
    first = pair.target.call("wait_released", pulled)
    pair.source.result()
    if first.error is None:  # it came before the lease ended
        pair.expect(REQUEST)
    pair.verify()
    assert pair.source.call("wait_released", offered, timeout_s=1).error in (None, "TicketExpired")


@pytest.fixture
def nodes() -> Iterator[tuple[Worker, Worker]]:
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(spawn_worker("helpers.loaded_worker:LoadedWorker")) for _ in range(2)]
        for name, worker in zip(("source", "target"), found, strict=True):
            worker.call("open", Geometry(), Placement(), seed=1, name=name)
        yield found[0], found[1]


def test_a_long_hold_of_the_lock_moves_no_lease_and_looks_dead_to_nobody(nodes: tuple[Worker, Worker]) -> None:
    """As an engine does that compiles a graph in one call. The source is held first, then the target."""
    held_s = rounds(3, 10)
    source, target = nodes
    _, lasting = source.call("offer", [6], 4, ttl_s=60, readers=1 << 16)
    target.call("measure", lasting, 7, seconds=0.1)  # connects
    short_s = held_s / 2
    # A push whose bytes are on their way when the lock is taken, and one that its owner will not commit in time.
    target.call("slow_down", delay_ms=1e3 * short_s)
    filled, ticket = target.call("reserve", [3], 4, ttl_s=held_s)
    moving = source.call("push_timed", ticket, [0], deadline_s=held_s)
    assert target.call("watch_moving", filled) == "moving"
    target.call("make_right_again")
    expiring, its = source.call("offer", [5], 4, ttl_s=short_s, readers=1 << 16)
    empty, ticket = target.call("reserve", [5], 4, ttl_s=60)
    unsaid = source.call("push", ticket, [0], deadline_s=short_s)
    ends_at = time.monotonic() + 0.9 * short_s
    source.start("hold_gil", held_s)
    taken = target.call("measure", lasting, 7, seconds=0.7 * held_s)
    assert len(taken) > 10
    refused = target.call("pull", its, [4], deadline_s=held_s)
    for handle, error in ((refused, TicketExpired), (empty, DeadlineExceeded)):
        with pytest.raises(error):
            target.call("wait", handle)
    target.call("wait", filled)
    refused_at = time.monotonic()
    assert [peer["state"] for peer in target.call("peers")] == ["ready"]
    held_from, held_until = source.result()
    assert held_until - held_from >= held_s
    assert ends_at < refused_at < held_until
    assert source.call("wait_released", expiring, timeout_s=1).error == "TicketExpired"
    assert source.call("wait_released", unsaid, timeout_s=1).error == "DeadlineExceeded"
    assert source.call("wait_released", moving, timeout_s=1).error is None

    offered, ticket = source.call("offer", [1], 4, ttl_s=60)
    filled, its = target.call("reserve", [4], 4, ttl_s=held_s)
    target.call("slow_down", delay_ms=300)
    pulled = target.call("pull", ticket, [2], deadline_s=held_s)
    target.start("hold_gil", short_s)
    pushed = source.call("push_timed", its, [0], deadline_s=held_s)
    for handle in (offered, pushed):
        assert source.call("wait_released", handle, timeout_s=held_s).error is None
    confirmed_at = time.monotonic()
    assert [peer["state"] for peer in source.call("peers")] == ["ready"]
    _, held_until = target.result()
    assert confirmed_at < held_until, "the handoffs ended only when the interpreter was free again"
    for handle in (pulled, filled):
        assert target.call("wait", handle).phases_s["total"] < short_s


def test_a_forked_child_gets_a_clear_error_and_disturbs_nothing(pair: Pair) -> None:
    pair.open()
    pair.hand_over(REQUEST)
    for leave in ("_exit", "exit"):
        said, code = pair.source.call("fork_and_use", leave=leave)
        assert said.startswith("typed "), said
        assert "fork" in said
        assert code == 0
    pair.hand_over(REQUEST)


def test_a_forked_child_that_lives_on_hides_no_death_of_its_parent(nodes: tuple[Worker, Worker]) -> None:
    """It has copies of its parent's descriptors, and a connection ends when the last copy is closed."""
    source, target = nodes
    _, ticket = source.call("offer", [1], 4, ttl_s=60)
    target.call("slow_down", delay_ms=60_000)
    pulled = target.call("pull", ticket, [2], deadline_s=60)
    target.call("signal_when_moving", pulled, pid=target.pid, signum=0)
    child = source.call("fork_and_stay")
    try:
        source.kill()
        with pytest.raises(PeerLost):
            target.call("wait", pulled, timeout_s=NOTICED_S)
        os.kill(child, 0)  # it is there still
    finally:
        os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)
