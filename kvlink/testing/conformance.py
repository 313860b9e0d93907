"""A kit that drives any engine adapter through what goes wrong in practice.

An adapter is the code between an engine and kvlink: it describes the cache, takes blocks from the
engine's allocator, offers and pulls, and gives blocks back once they are released. The kit knows it
through the few calls of `Adapter`. ``CASES`` has a function for each class of faults; each makes
adapters of its own and raises ``AssertionError`` that says what the adapter did.

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
    def test_my_adapter(case):
        case(Kit(make=lambda name: MyAdapter(name)))
"""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from kvlink.errors import KvlinkError
from kvlink.handoff import Node, TicketMint
from kvlink.testing.faults import FaultScript, inject_faults, remove_faults

__all__ = ["CASES", "Adapter", "Kit"]

_DEADLINE_S = 10.0
# No call may take longer, whatever the peer does: an engine's loop would stand still.
_LONGEST_CALL_S = 0.5
_ABORT_ROUNDS = 24
_FAULT_ROUNDS = 12
_FAULTS = {
    "bytes that are lost": FaultScript(reorder=True, drop=0.3),
    "bytes that come twice": FaultScript(reorder=True, duplicate=0.5),
    "a lane that fails": FaultScript(fail_after_bytes=1),
    "a lane that is busy": FaultScript(no_resource=2),
}
# A cancel stops nothing that is under way, as over a reliable network.
_LATE = FaultScript(like_rc=True, delay_ms=10.0, error_after_s=0.01)


class Adapter(Protocol):
    """One worker of an engine, as the kit drives it. A request is whatever the adapter likes, but hashable."""

    @property
    def node(self) -> Node:
        """Its node."""
        ...

    @property
    def block_tokens(self) -> int:
        """Tokens in one of its blocks."""
        ...

    def num_free(self) -> int:
        """Return how many blocks a new request could have now."""
        ...

    def send(self, *, num_tokens: int, seed: int, ttl_s: float) -> Any:
        """Compute a request of so many tokens, another one for each seed, and offer it; ``None`` without room."""
        ...

    def ticket(self, request: Any) -> dict[str, Any]:
        """Return the ticket of a request that was sent."""
        ...

    def receive(self, ticket: dict[str, Any], *, deadline_s: float) -> Any:
        """Begin to read a request into new blocks; ``None`` without room.

        What kvlink raises at once may be raised here, if the blocks are given back, or later by ``poll``.
        """
        ...

    def poll(self, request: Any) -> bool:
        """Return whether its handoff has succeeded; raise what it failed with. Never waits."""
        ...

    def content(self, request: Any) -> bytes:
        """Return the bytes of its tokens, in an order that does not depend on which blocks they lie in."""
        ...

    def abort(self, request: Any) -> None:
        """Give a request up, whatever it is doing, as when its client has gone. Includes ``finish``."""
        ...

    def finish(self, request: Any) -> None:
        """Be done with a request: its blocks become free, as soon as they may. Harmless when it was done before."""
        ...

    def close(self) -> None:
        """End, with whatever is under way. Harmless when repeated."""
        ...


@dataclass(frozen=True, kw_only=True)
class Kit:
    """What a case runs with.

    Attributes
    ----------
    make
        Makes an adapter of this name, with room for a dozen requests of three blocks at least.
    seed
        Of all that is drawn.
    """

    make: Callable[[str], Adapter]
    seed: int = 20
    _rng: random.Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Begin to draw."""
        object.__setattr__(self, "_rng", random.Random(self.seed))

    @property
    def rng(self) -> random.Random:
        """The source of all that is drawn."""
        return self._rng

    @contextlib.contextmanager
    def pair(self) -> Iterator[tuple[Adapter, Adapter]]:
        """Lend a source and a target; at the end all blocks of both must be free."""
        source, target = self.make("source"), self.make("target")
        free = source.num_free(), target.num_free()
        try:
            yield source, target
            _until_free(source, free[0])
            _until_free(target, free[1])
        finally:
            source.close()
            target.close()


def _until(happened: Callable[[], bool], what: str, *, timeout_s: float | None = None) -> None:
    timeout_s = _DEADLINE_S if timeout_s is None else timeout_s
    until = time.monotonic() + timeout_s
    while not _quick(happened):
        assert time.monotonic() < until, f"it did not happen in {timeout_s:g} s: {what}"
        time.sleep(0.001)


def _until_free(side: Adapter, count: int) -> None:
    _until(lambda: side.num_free() == count, f"{count} free blocks, as at the start, at {side.node.name}")


def _quick(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return what `call` returns, and make sure that it did not wait."""
    started = time.monotonic()
    try:
        return call(*args, **options)
    finally:
        took_s = time.monotonic() - started
        assert took_s < _LONGEST_CALL_S, f"{getattr(call, '__name__', call)} took {took_s:.2f} s: it must not wait"


def _ended(side: Adapter, request: Any, *, timeout_s: float | None = None) -> KvlinkError | None:
    """Wait for the outcome; return what it failed with."""
    failures: list[KvlinkError] = []

    def has_ended() -> bool:
        try:
            return bool(side.poll(request))
        except KvlinkError as error:
            failures.append(error)
            return True

    _until(has_ended, f"the outcome of a request at {side.node.name}", timeout_s=timeout_s)
    return failures[0] if failures else None


def _received(target: Adapter, ticket: dict[str, Any], *, deadline_s: float = _DEADLINE_S) -> KvlinkError | None:
    """Receive and finish; return what it failed with."""
    try:
        request = _quick(target.receive, ticket, deadline_s=deadline_s)
    except KvlinkError as error:
        return error
    assert request is not None, "there was no room to receive, and there should be"
    failure = _ended(target, request, timeout_s=deadline_s + 2)
    target.finish(request)
    return failure


def _sent(source: Adapter, num_tokens: int, seed: int, *, ttl_s: float = 30.0) -> tuple[Any, dict[str, Any], bytes]:
    request = source.send(num_tokens=num_tokens, seed=seed, ttl_s=ttl_s)
    assert request is not None, "there was no room to send, and there should be"
    return request, source.ticket(request), source.content(request)


def _hand_over(source: Adapter, target: Adapter, num_tokens: int, seed: int) -> None:
    """Hand one request over and compare its bytes."""
    request, ticket, content = _sent(source, num_tokens, seed)
    received = _quick(target.receive, ticket, deadline_s=_DEADLINE_S)
    assert received is not None, "there was no room to receive, and there should be"
    error = _ended(target, received)
    assert error is None, f"{num_tokens} tokens did not arrive: {error!r}"
    assert target.content(received) == content, f"{num_tokens} tokens have arrived with other bytes"
    assert _ended(source, request) is None, "it has arrived, and the source calls it failed"
    target.finish(received)
    source.finish(request)


def partial_ranges(kit: Kit) -> None:
    """See that requests which end inside, at and behind a block arrive exactly."""
    with kit.pair() as (source, target):
        block = source.block_tokens
        for seed, num_tokens in enumerate((1, block - 1, block, block + 1, 3 * block - 1, 3 * block)):
            if num_tokens > 0:
                _hand_over(source, target, num_tokens, seed)


def reuse_in_flight(kit: Kit) -> None:
    """See that requests which are aborted at any moment write nothing into the blocks of those that come after."""
    with kit.pair() as (source, target):
        for round_ in range(_ABORT_ROUNDS):
            inject_faults(target.node, replace(_LATE, seed=round_))
            request, ticket, _ = _sent(source, 3 * source.block_tokens, round_)
            received = target.receive(ticket, deadline_s=_DEADLINE_S)
            time.sleep(kit.rng.choice((0.0, 0.0002, 0.001, 0.003)))
            first, second = kit.rng.sample(((target, received), (source, request)), 2)
            _quick(first[0].abort, first[1])
            remove_faults(target.node)
            _hand_over(source, target, 3 * source.block_tokens, 1000 + round_)
            _quick(second[0].abort, second[1])
            _until(lambda: target.num_free() >= 9, "a few free blocks, after requests were aborted")


def stale_peer(kit: Kit) -> None:
    """See that a source which was started anew is not taken for the one before, and works at once."""
    target = kit.make("target")
    free = target.num_free()
    with contextlib.closing(target):
        for life in range(3):
            source = kit.make("source")
            with contextlib.closing(source):
                _hand_over(source, target, source.block_tokens, life)
                _, old, _ = _sent(source, source.block_tokens, 10 + life)
            error = _received(target, old, deadline_s=1.0)
            assert error is not None, "a request of a source that is gone was called done"
        _until_free(target, free)


def failure_as_success(kit: Kit) -> None:
    """See that what was read before, has expired, was withdrawn or altered is refused, and only that."""
    with kit.pair() as (source, target):
        request, ticket, _ = _sent(source, source.block_tokens, 1)
        assert _received(target, ticket) is None
        assert _received(target, ticket) is not None, "a request was handed over twice"
        source.finish(request)
        request, ticket, _ = _sent(source, source.block_tokens, 2, ttl_s=0.05)
        assert _ended(source, request) is not None, "an offer that nobody has read was called done"
        assert _received(target, ticket) is not None, "a request was called done after its lease"
        source.finish(request)
        request, ticket, _ = _sent(source, source.block_tokens, 3)
        source.abort(request)
        assert _received(target, ticket) is not None, "a request was called done after it was given up"
        request, ticket, _ = _sent(source, source.block_tokens, 4)
        altered = {**ticket, "num_tokens": ticket["num_tokens"] + 1}
        assert _received(target, altered) is not None, "an altered ticket was taken"
        assert _received(target, ticket) is None, "the right one was not, after that"
        source.finish(request)


def stranded_blocks(kit: Kit) -> None:
    """See that all orders of abort, expiry, finish and arrival give each block back once."""
    with kit.pair() as (source, target):
        for seed in range(12):
            request, ticket, _ = _sent(source, 2 * source.block_tokens, seed, ttl_s=kit.rng.choice((0.02, 5.0)))
            received = target.receive(ticket, deadline_s=kit.rng.choice((0.05, 5.0)))
            steps = [
                (source.abort, request),
                (source.finish, request),
                (target.abort, received),
                (target.finish, received),
            ]
            kit.rng.shuffle(steps)
            for step, argument in steps:
                time.sleep(kit.rng.choice((0.0, 0.001, 0.03)))
                _quick(step, argument)


def unbounded_wait(kit: Kit) -> None:
    """See that a peer which never answers costs its own deadline, and that no call waits."""
    with kit.pair() as (source, target), socket.create_server(("127.0.0.1", 0)) as listener:
        address = "{}:{}".format(*listener.getsockname())
        descriptor = {**source.node.descriptor, "name": "silent", "address": address, "epoch": "ab" * 16}
        ticket = TicketMint([descriptor]).offer(num_tokens=target.block_tokens)
        started = time.monotonic()
        received = _quick(target.receive, ticket, deadline_s=1.0)
        _hand_over(source, target, source.block_tokens, 1)  # which others need not wait for
        assert _ended(target, received, timeout_s=5) is not None, "a silent peer was called done"
        assert time.monotonic() - started < 4, "the deadline was a second"
        target.finish(received)


def identity(kit: Kit) -> None:
    """See that requests which are alike are not mistaken for each other, in whichever order they are read."""
    with kit.pair() as (source, target):
        sent = [_sent(source, source.block_tokens + 1, seed) for seed in (1, 2, 1, 3)]
        order = kit.rng.sample(sent, len(sent))
        received = [(target.receive(ticket, deadline_s=_DEADLINE_S), content) for _, ticket, content in order]
        for request, content in received:
            assert _ended(target, request) is None
            assert target.content(request) == content, "two requests were mixed up"
            target.finish(request)
        for request, _, _ in sent:
            assert _ended(source, request) is None
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
            taken = target.receive(source.ticket(request), deadline_s=_DEADLINE_S)
            if taken is None:
                break
            received.append(taken)
        for taken in received:
            assert _ended(target, taken) is None
            target.finish(taken)
        for request in sent:
            source.abort(request)
        _until(lambda: source.num_free() * block >= 3 * block, "room again after all were aborted")
        _hand_over(source, target, 3 * block, 99)


def faulty_lanes(kit: Kit) -> None:
    """See that bytes which are lost, doubled, late or out of order are called done only if they are right."""
    with kit.pair() as (source, target):
        for round_ in range(_FAULT_ROUNDS):
            name = kit.rng.choice(list(_FAULTS))
            inject_faults(target.node, replace(_FAULTS[name], seed=round_, delay_ms=kit.rng.choice((0.0, 5.0))))
            request, ticket, content = _sent(source, 3 * source.block_tokens, round_)
            received = target.receive(ticket, deadline_s=0.5)
            if _ended(target, received) is None:
                assert target.content(received) == content, f"wrong bytes were called done, with {name}"
            target.finish(received)
            source.abort(request)
            remove_faults(target.node)
        _hand_over(source, target, source.block_tokens, 99)


def closing(kit: Kit) -> None:
    """Close in the middle, twice and in either order: everything has an outcome."""
    for source_first in (True, False):
        source, target = kit.make("source"), kit.make("target")
        request, ticket, _ = _sent(source, 3 * source.block_tokens, 1)
        received = target.receive(ticket, deadline_s=_DEADLINE_S)
        sides = ((source, request), (target, received)) if source_first else ((target, received), (source, request))
        for side, _ in sides:
            side.close()
        for side, one in sides:
            _ended(side, one)
            side.close()


CASES: tuple[Callable[[Kit], None], ...] = (
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
"""One for each class of faults."""
