"""The interpreter's lock, and forks."""

from __future__ import annotations

import time

from helpers.patterns import Request
from helpers.processes import Pair

REQUEST = Request(source_blocks=(6, 1, 4), target_blocks=(0, 7, 3), num_tokens=11)
HELD_S = 2.0


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


def test_a_forked_child_gets_a_clear_error_and_disturbs_nothing(pair: Pair) -> None:
    pair.open()
    pair.hand_over(REQUEST)
    for leave in ("_exit", "exit"):
        said, code = pair.source.call("fork_and_use", leave=leave)
        assert said.startswith("typed "), said
        assert "fork" in said
        assert code == 0
    pair.hand_over(REQUEST)
