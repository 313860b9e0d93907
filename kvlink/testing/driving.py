"""How the conformance kit drives an adapter: the calls that it knows one by, and handoffs between two of them."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvlink.errors import KvlinkError
from kvlink.handoff import Node

__all__ = [
    "Adapter",
    "Kit",
    "begin",
    "ended",
    "hand_over",
    "push_and_finish",
    "quick",
    "receive_and_finish",
    "reserve",
    "send",
    "until",
    "until_free",
]

DEADLINE_S = 10.0
# No call may take longer, whatever the peer does: an engine's loop would stand still.
_LONGEST_CALL_S = 0.5


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
        """Return the ticket of a request that was sent or reserved."""
        ...

    def receive(self, ticket: dict[str, Any], *, deadline_s: float) -> Any:
        """Begin to read a request into new blocks; ``None`` without room.

        What kvlink raises at once may be raised here, if the blocks are given back, or later by ``poll``.
        """
        ...

    def reserve(self, *, num_tokens: int, ttl_s: float) -> Any:
        """Set blocks aside for a request that another adapter will push; ``None`` without room."""
        ...

    def push(self, ticket: dict[str, Any], *, seed: int, deadline_s: float) -> Any:
        """Compute a request of the ticket's length, as ``send`` does, and push it; ``None`` without room.

        What kvlink raises at once may be raised here, as in ``receive``.
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
    pushes
        Whether requests are pushed, and not pulled. The cases for pushes set it themselves.
    """

    make: Callable[[str], Adapter]
    seed: int = 20
    pushes: bool = False
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
            until_free(source, free[0])
            until_free(target, free[1])
        finally:
            source.close()
            target.close()


def until(happened: Callable[[], bool], what: str, *, timeout_s: float | None = None) -> None:
    """Wait until `happened` returns true; it must not wait itself."""
    timeout_s = DEADLINE_S if timeout_s is None else timeout_s
    until = time.monotonic() + timeout_s
    while not quick(happened):
        assert time.monotonic() < until, f"it did not happen in {timeout_s:g} s: {what}"
        time.sleep(0.001)


def until_free(side: Adapter, count: int) -> None:
    """Wait until so many blocks are free."""
    until(lambda: side.num_free() == count, f"{count} free blocks, as at the start, at {side.node.name}")


def quick(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return what `call` returns, and make sure that it did not wait."""
    started = time.monotonic()
    try:
        return call(*args, **options)
    finally:
        took_s = time.monotonic() - started
        assert took_s < _LONGEST_CALL_S, f"{getattr(call, '__name__', call)} took {took_s:.2f} s: it must not wait"


def ended(side: Adapter, request: Any, *, timeout_s: float | None = None) -> KvlinkError | None:
    """Wait for the outcome; return what it failed with."""
    failures: list[KvlinkError] = []

    def has_ended() -> bool:
        try:
            return bool(side.poll(request))
        except KvlinkError as error:
            failures.append(error)
            return True

    until(has_ended, f"the outcome of a request at {side.node.name}", timeout_s=timeout_s)
    return failures[0] if failures else None


def receive_and_finish(
    target: Adapter, ticket: dict[str, Any], *, deadline_s: float = DEADLINE_S
) -> KvlinkError | None:
    """Receive and finish; return what it failed with."""
    try:
        request = quick(target.receive, ticket, deadline_s=deadline_s)
    except KvlinkError as error:
        return error
    assert request is not None, "there was no room to receive, and there should be"
    failure = ended(target, request, timeout_s=deadline_s + 2)
    target.finish(request)
    return failure


def send(source: Adapter, num_tokens: int, seed: int, *, ttl_s: float = 30.0) -> tuple[Any, dict[str, Any], bytes]:
    """Send; return the request, its ticket and its bytes."""
    request = source.send(num_tokens=num_tokens, seed=seed, ttl_s=ttl_s)
    assert request is not None, "there was no room to send, and there should be"
    return request, source.ticket(request), source.content(request)


def reserve(target: Adapter, num_tokens: int, *, ttl_s: float = 30.0) -> tuple[Any, dict[str, Any]]:
    """Reserve; return the request and its ticket."""
    request = quick(target.reserve, num_tokens=num_tokens, ttl_s=ttl_s)
    assert request is not None, "there was no room to reserve, and there should be"
    return request, target.ticket(request)


def push_and_finish(source: Adapter, ticket: dict[str, Any], *, seed: int = 1) -> KvlinkError | None:
    """Push and finish; return what it failed with."""
    try:
        request = source.push(ticket, seed=seed, deadline_s=DEADLINE_S)
    except KvlinkError as error:
        return error
    assert request is not None, "there was no room to push, and there should be"
    failure = ended(source, request, timeout_s=DEADLINE_S + 2)
    source.finish(request)
    return failure


def begin(
    kit: Kit,
    source: Adapter,
    target: Adapter,
    *,
    num_tokens: int,
    seed: int,
    ttl_s: float = 30.0,
    deadline_s: float = DEADLINE_S,
) -> tuple[Any, Any, bytes]:
    """Begin to hand one request over; return it as either side has it, and its bytes."""
    if kit.pushes:
        received, ticket = reserve(target, num_tokens, ttl_s=ttl_s)
        request = source.push(ticket, seed=seed, deadline_s=deadline_s)
        assert request is not None, "there was no room to push, and there should be"
        return request, received, source.content(request)
    request, ticket, content = send(source, num_tokens, seed, ttl_s=ttl_s)
    received = quick(target.receive, ticket, deadline_s=deadline_s)
    assert received is not None, "there was no room to receive, and there should be"
    return request, received, content


def hand_over(kit: Kit, source: Adapter, target: Adapter, *, num_tokens: int, seed: int) -> None:
    """Hand one request over and compare its bytes."""
    request, received, content = begin(kit, source, target, num_tokens=num_tokens, seed=seed)
    error = ended(target, received)
    assert error is None, f"{num_tokens} tokens did not arrive: {error!r}"
    assert target.content(received) == content, f"{num_tokens} tokens have arrived with other bytes"
    assert ended(source, request) is None, "it has arrived, and the source calls it failed"
    target.finish(received)
    source.finish(request)
