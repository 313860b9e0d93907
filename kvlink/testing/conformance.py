"""A kit that drives any engine adapter through what goes wrong in practice.

An adapter is the code between an engine and kvlink: it describes the cache, takes blocks from the
engine's allocator, offers and pulls, reserves and pushes, and gives blocks back once they are
released. The kit knows it through the few calls of `Adapter`. ``CASES`` has a function for each
class of faults, by pulls and by pushes; each makes adapters of its own and raises
``AssertionError`` that says what the adapter did. For an adapter that only pulls there are
``PULL_CASES``.

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
    def test_my_adapter(case):
        case(Kit(make=lambda name: MyAdapter(name)))
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvlink.handoff import TicketMint
from kvlink.handoff.reservation import make_reservation
from kvlink.handoff.ticket import TicketSource
from kvlink.testing import driving as drive
from kvlink.testing.driving import Adapter, Kit
from kvlink.testing.faults import FaultScript, inject_faults, remove_faults

__all__ = ["CASES", "PULL_CASES", "PUSH_CASES", "Adapter", "Kit"]

_ABORT_ROUNDS = 16
_FAULT_ROUNDS = 8
_FAULTS = {
    "bytes that are lost": FaultScript(reorder=True, drop=0.3),
    "bytes that come twice": FaultScript(reorder=True, duplicate=0.5),
    "a lane that fails": FaultScript(fail_after_bytes=1),
    "a lane that is busy": FaultScript(no_resource=2),
}
# A cancel stops nothing that is under way, as over a reliable network.
_LATE = FaultScript(like_rc=True, delay_ms=10.0, error_after_s=0.01)


def partial_ranges(kit: Kit) -> None:
    """See that requests which end inside, at and behind a block arrive exactly."""
    with kit.pair() as (source, target):
        block = source.block_tokens
        for seed, num_tokens in enumerate((1, block - 1, block, block + 1, 3 * block - 1, 3 * block)):
            if num_tokens > 0:
                drive.hand_over(kit, source, target, num_tokens=num_tokens, seed=seed)


def reuse_in_flight(kit: Kit) -> None:
    """See that requests which are aborted at any moment write nothing into the blocks of those that come after."""
    with kit.pair() as (source, target):
        for round_ in range(_ABORT_ROUNDS):
            inject_faults(target.node, replace(_LATE, seed=round_))
            request, received, _ = drive.begin(kit, source, target, num_tokens=3 * source.block_tokens, seed=round_)
            time.sleep(kit.rng.choice((0.0, 0.0002, 0.001, 0.003)))
            first, second = kit.rng.sample(((target, received), (source, request)), 2)
            drive.quick(first[0].abort, first[1])
            remove_faults(target.node)
            drive.hand_over(kit, source, target, num_tokens=3 * source.block_tokens, seed=1000 + round_)
            drive.quick(second[0].abort, second[1])
            drive.until(lambda: target.num_free() >= 9, "a few free blocks, after requests were aborted")


def stale_peer(kit: Kit) -> None:
    """See that a source which was started anew is not taken for the one before, and works at once."""
    target = kit.make("target")
    free = target.num_free()
    with contextlib.closing(target):
        for life in range(3):
            source = kit.make("source")
            with contextlib.closing(source):
                drive.hand_over(kit, source, target, num_tokens=source.block_tokens, seed=life)
                _, old, _ = drive.send(source, source.block_tokens, 10 + life)
            error = drive.receive_and_finish(target, old, deadline_s=1.0)
            assert error is not None, "a request of a source that is gone was called done"
        drive.until_free(target, free)


def failure_as_success(kit: Kit) -> None:
    """See that what was read before, has expired, was withdrawn or altered is refused, and only that."""
    with kit.pair() as (source, target):
        request, ticket, _ = drive.send(source, source.block_tokens, 1)
        assert drive.receive_and_finish(target, ticket) is None
        assert drive.receive_and_finish(target, ticket) is not None, "a request was handed over twice"
        source.finish(request)
        request, ticket, _ = drive.send(source, source.block_tokens, 2, ttl_s=0.05)
        assert drive.ended(source, request) is not None, "an offer that nobody has read was called done"
        assert drive.receive_and_finish(target, ticket) is not None, "a request was called done after its lease"
        source.finish(request)
        request, ticket, _ = drive.send(source, source.block_tokens, 3)
        source.abort(request)
        assert drive.receive_and_finish(target, ticket) is not None, "a request was called done after it was given up"
        request, ticket, _ = drive.send(source, source.block_tokens, 4)
        altered = {**ticket, "num_tokens": ticket["num_tokens"] + 1}
        assert drive.receive_and_finish(target, altered) is not None, "an altered ticket was taken"
        assert drive.receive_and_finish(target, ticket) is None, "the right one was not, after that"
        source.finish(request)


def stranded_blocks(kit: Kit) -> None:
    """See that all orders of abort, expiry, finish and arrival give each block back once."""
    with kit.pair() as (source, target):
        for seed in range(12):
            ttl_s, deadline_s = kit.rng.choice((0.02, 5.0)), kit.rng.choice((0.05, 5.0))
            request, received, _ = drive.begin(
                kit, source, target, num_tokens=2 * source.block_tokens, seed=seed, ttl_s=ttl_s, deadline_s=deadline_s
            )
            steps = [
                (source.abort, request),
                (source.finish, request),
                (target.abort, received),
                (target.finish, received),
            ]
            kit.rng.shuffle(steps)
            for step, argument in steps:
                time.sleep(kit.rng.choice((0.0, 0.001, 0.03)))
                drive.quick(step, argument)


def unbounded_wait(kit: Kit) -> None:
    """See that a peer which never answers costs its own deadline, and that no call waits."""
    with kit.pair() as (source, target), socket.create_server(("127.0.0.1", 0)) as listener:
        address = "{}:{}".format(*listener.getsockname())
        descriptor = {**source.node.descriptor, "name": "silent", "address": address, "epoch": "ab" * 16}
        ticket = TicketMint([descriptor]).offer(num_tokens=target.block_tokens)
        started = time.monotonic()
        received = drive.quick(target.receive, ticket, deadline_s=1.0)
        drive.hand_over(kit, source, target, num_tokens=source.block_tokens, seed=1)  # which others need not wait for
        assert drive.ended(target, received, timeout_s=5) is not None, "a silent peer was called done"
        assert time.monotonic() - started < 4, "the deadline was a second"
        target.finish(received)


def identity(kit: Kit) -> None:
    """See that requests which are alike are not mistaken for each other, in whichever order they are read."""
    with kit.pair() as (source, target):
        num_tokens = source.block_tokens + 1
        if kit.pushes:
            reserved = [drive.reserve(target, num_tokens) for _ in range(4)]
            order = list(zip(kit.rng.sample(reserved, 4), (1, 2, 1, 3), strict=True))
            given = [source.push(ticket, seed=seed, deadline_s=drive.DEADLINE_S) for (_, ticket), seed in order]
            taken = [(one, source.content(by)) for ((one, _), _), by in zip(order, given, strict=True)]
        else:
            sent = [drive.send(source, num_tokens, seed) for seed in (1, 2, 1, 3)]
            given = [request for request, _, _ in sent]
            taken = [
                (target.receive(ticket, deadline_s=drive.DEADLINE_S), content)
                for _, ticket, content in kit.rng.sample(sent, len(sent))
            ]
        for request, content in taken:
            assert drive.ended(target, request) is None
            assert target.content(request) == content, "two requests were mixed up"
            target.finish(request)
        for request in given:
            assert drive.ended(source, request) is None
            source.finish(request)


def admission(kit: Kit) -> None:
    """See that without room nothing is taken and nothing breaks, and with room again it goes on."""
    with kit.pair() as (source, target):
        block = source.block_tokens
        sent: list[Any] = []
        while (request := source.send(num_tokens=3 * block, seed=len(sent), ttl_s=30.0)) is not None:
            sent.append(request)
            assert len(sent) < 10_000, "there is always room: is num_free right?"
        assert source.num_free() * block < 3 * block, "there was room, and it was refused"
        received = []
        for request in sent:
            taken = target.receive(source.ticket(request), deadline_s=drive.DEADLINE_S)
            if taken is None:
                break
            received.append(taken)
        for taken in received:
            assert drive.ended(target, taken) is None
            target.finish(taken)
        for request in sent:
            source.abort(request)
        drive.until(lambda: source.num_free() * block >= 3 * block, "room again after all were aborted")
        drive.hand_over(kit, source, target, num_tokens=3 * block, seed=99)


def faulty_lanes(kit: Kit) -> None:
    """See that bytes which are lost, doubled, late or out of order are called done only if they are right."""
    with kit.pair() as (source, target):
        for round_ in range(_FAULT_ROUNDS):
            name = kit.rng.choice(list(_FAULTS))
            inject_faults(target.node, replace(_FAULTS[name], seed=round_, delay_ms=kit.rng.choice((0.0, 5.0))))
            request, received, content = drive.begin(
                kit, source, target, num_tokens=3 * source.block_tokens, seed=round_, ttl_s=0.5, deadline_s=0.5
            )
            if drive.ended(target, received) is None:
                assert target.content(received) == content, f"wrong bytes were called done, with {name}"
            target.finish(received)
            source.abort(request)
            remove_faults(target.node)
        drive.hand_over(kit, source, target, num_tokens=source.block_tokens, seed=99)


def closing(kit: Kit) -> None:
    """Close in the middle, twice and in either order: everything has an outcome."""
    for source_first in (True, False):
        source, target = kit.make("source"), kit.make("target")
        request, received, _ = drive.begin(kit, source, target, num_tokens=3 * source.block_tokens, seed=1)
        sides = ((source, request), (target, received)) if source_first else ((target, received), (source, request))
        for side, _ in sides:
            side.close()
        for side, one in sides:
            drive.ended(side, one)
            side.close()


def stale_target(kit: Kit) -> None:
    """See that what a target has reserved in one life is not pushed into the next, which works at once."""
    source = kit.make("source")
    free = source.num_free()
    with contextlib.closing(source):
        for life in range(3):
            target = kit.make("target")
            with contextlib.closing(target):
                drive.hand_over(kit, source, target, num_tokens=source.block_tokens, seed=life)
                _, old = drive.reserve(target, source.block_tokens)
            assert drive.push_and_finish(source, old) is not None, "a push to a target that is gone was called done"
        drive.until_free(source, free)


def reservations_that_are_over(kit: Kit) -> None:
    """See that what was filled before, has expired, was given up or altered is refused, and only that."""
    with kit.pair() as (source, target):
        request, ticket = drive.reserve(target, source.block_tokens)
        assert drive.push_and_finish(source, ticket) is None
        assert drive.push_and_finish(source, ticket) is not None, "a request was pushed twice"
        assert drive.ended(target, request) is None
        target.finish(request)
        request, ticket = drive.reserve(target, source.block_tokens, ttl_s=0.05)
        assert drive.ended(target, request) is not None, "a reservation that nobody fills was called done"
        assert drive.push_and_finish(source, ticket) is not None, "a request was called done after its time"
        target.finish(request)
        request, ticket = drive.reserve(target, source.block_tokens)
        target.abort(request)
        assert drive.push_and_finish(source, ticket) is not None, "a request was called done after it was given up"
        request, ticket = drive.reserve(target, source.block_tokens)
        altered = {**ticket, "num_tokens": ticket["num_tokens"] + 1}
        assert drive.push_and_finish(source, altered) is not None, "an altered ticket was taken"
        assert drive.push_and_finish(source, ticket) is None, "the right one was not, after that"
        assert drive.ended(target, request) is None
        target.finish(request)


def silent_target(kit: Kit) -> None:
    """See that a target which never answers, or a push which never comes, costs its own time, and no call waits."""
    with kit.pair() as (source, target), socket.create_server(("127.0.0.1", 0)) as listener:
        silent = TicketSource(name="silent", address="{}:{}".format(*listener.getsockname()), epoch="ab" * 16)
        ticket = make_reservation(
            epoch=silent.epoch_bytes,
            sequence=1,
            target=silent,
            num_tokens=target.block_tokens,
            skip_tokens=0,
            groups=[group.name for group in source.node.cache.layout.groups],
            ttl_ms=1000,
        )
        started = time.monotonic()
        pushed = drive.quick(source.push, ticket, seed=1, deadline_s=1.0)
        waiting, _ = drive.reserve(target, target.block_tokens, ttl_s=1.0)
        drive.hand_over(kit, source, target, num_tokens=source.block_tokens, seed=2)  # which others need not wait for
        assert drive.ended(source, pushed, timeout_s=5) is not None, "a push to a silent target was called done"
        assert drive.ended(target, waiting, timeout_s=5) is not None, "a reservation that nobody fills was called done"
        assert time.monotonic() - started < 4, "the deadline was a second"
        source.finish(pushed)
        target.finish(waiting)


def admission_of_pushes(kit: Kit) -> None:
    """See that without room nothing is reserved or pushed and nothing breaks, and with room again it goes on."""
    with kit.pair() as (source, target):
        block = source.block_tokens
        reserved: list[Any] = []
        while (request := target.reserve(num_tokens=3 * block, ttl_s=30.0)) is not None:
            reserved.append(request)
            assert len(reserved) < 10_000, "there is always room: is num_free right?"
        assert target.num_free() * block < 3 * block, "there was room, and it was refused"
        pushed: list[Any] = []
        for request in reserved:
            given = source.push(target.ticket(request), seed=len(pushed), deadline_s=drive.DEADLINE_S)
            if given is None:
                break
            pushed.append(given)
        for given, request in zip(pushed, reserved, strict=False):
            assert drive.ended(source, given) is None
            assert drive.ended(target, request) is None
            source.finish(given)
        for request in reserved:
            target.abort(request)
        drive.until(lambda: target.num_free() * block >= 3 * block, "room again after all were given up")
        drive.hand_over(kit, source, target, num_tokens=3 * block, seed=99)


def _by_push(case: Callable[[Kit], None]) -> Callable[[Kit], None]:
    def pushed(kit: Kit) -> None:
        case(replace(kit, pushes=True))

    pushed.__name__ = case.__name__ if case.__name__ not in _NAMES else f"pushed_{case.__name__}"
    pushed.__doc__ = case.__doc__
    return pushed


PULL_CASES: tuple[Callable[[Kit], None], ...] = (
    partial_ranges,
    reuse_in_flight,
    stale_peer,
    failure_as_success,
    stranded_blocks,
    unbounded_wait,
    identity,
    admission,
    faulty_lanes,
    closing,
)
"""One for each class of faults, by pulls."""

_NAMES = frozenset(case.__name__ for case in PULL_CASES)

PUSH_CASES: tuple[Callable[[Kit], None], ...] = tuple(
    _by_push(case)
    for case in (
        partial_ranges,
        reuse_in_flight,
        stale_target,
        reservations_that_are_over,
        stranded_blocks,
        silent_target,
        identity,
        admission_of_pushes,
        faulty_lanes,
        closing,
    )
)
"""The same by pushes."""

CASES = PULL_CASES + PUSH_CASES
"""All of them."""
