"""Which decode worker a finished prefill goes to, and the whole way of handing it over.

The scheduler runs where prefill runs. It knows a fixed list of decode workers, keeps a book of the
blocks it has given out on each, and for every handoff makes the offer, sends the ticket to the
chosen worker, and waits until that worker has read everything. How a ticket reaches a worker (a
pipe, an HTTP request, the engine's own RPC) is the caller's: a worker is a name, a number of free
blocks and something to call with a ticket.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvlink.errors import Busy, ConfigError, InvalidArgument
from kvlink.handoff import Node, Offer
from kvlink.handoff.arguments import check_count
from kvlink.handoff.block_tables import Blocks

__all__ = ["DecodeWorker", "HandOffReport", "Placement", "Scheduler"]

_MOST_TOKENS = (1 << 31) - 1

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeWorker:
    """A decode worker as the scheduler sees it.

    Attributes
    ----------
    name
        Unique in the scheduler.
    free_blocks
        Blocks that the worker has for requests of this scheduler: one number for every group of
        the cache, or one for each by its name.
    hand_off
        Called with a ticket to be pulled by that worker; may be a coroutine function. It returns
        once the worker has the ticket, and raises if it will not have it. A plain function must
        not block for long: it runs in the scheduler's loop.
    block_tokens
        Tokens in one of the worker's blocks, where it is not what the node's own have: one number
        for every group, or one for each by its name. Means nothing for slots of state.
    """

    name: str
    free_blocks: int | Mapping[str, int]
    hand_off: Callable[[dict[str, Any]], Awaitable[Any] | Any]
    block_tokens: int | Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Room reserved on one worker, until ``Scheduler.release``."""

    number: int
    worker: str
    num_tokens: int
    blocks: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOffReport:
    """How one handoff went; ``reply`` is what the worker's ``hand_off`` returned."""

    worker: str
    handoff: str
    seconds: float
    phases_s: Mapping[str, float]
    reply: Any


@dataclass(slots=True, kw_only=True)
class _Shelf:
    """What the book says about one worker. Groups without ``block_tokens`` have slots, one for a request."""

    worker: DecodeWorker
    position: int
    capacity: dict[str, int]
    block_tokens: dict[str, int | None]
    free: dict[str, int] = field(init=False)
    placements: dict[int, Placement] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free = dict(self.capacity)

    def needed(self, num_tokens: int) -> dict[str, int]:
        return {
            group: min(num_tokens, 1) if block_tokens is None else -(-num_tokens // block_tokens)
            for group, block_tokens in self.block_tokens.items()
        }

    def has_room(self, num_tokens: int) -> bool:
        return all(self.free[group] >= count for group, count in self.needed(num_tokens).items())

    def could_have_room(self, num_tokens: int) -> bool:
        return all(self.capacity[group] >= count for group, count in self.needed(num_tokens).items())

    def rank(self) -> tuple[int, int, int]:
        """Order of preference, the best first: most room, fewest requests, first in the list."""
        room = [self.free[group] * tokens for group, tokens in self.block_tokens.items() if tokens is not None]
        return -min(room or self.free.values()), len(self.placements), self.position


class Scheduler:
    """Places requests on decode workers and hands them over. Thread-safe.

    Awaitable methods come in a blocking form too, for programs without an asyncio loop.

    Parameters
    ----------
    node
        The prefill side's node, which makes the offers.
    workers
        The decode workers; the list does not change.

    Raises
    ------
    ConfigError
        If there is no worker, two share a name, or what one says of its blocks does not fit the groups.
    """

    def __init__(self, node: Node, *, workers: Sequence[DecodeWorker]) -> None:
        self._node = node
        self._block_tokens = {
            group.name: None if group.slots else group.block_tokens for group in node.cache.layout.groups
        }
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._shelves: dict[str, _Shelf] = {}
        for position, worker in enumerate(workers):
            if worker.name in self._shelves:
                raise ConfigError(f"scheduler: two workers are called {worker.name!r}")
            self._shelves[worker.name] = _Shelf(
                worker=worker,
                position=position,
                capacity=self._by_group(worker, "free_blocks", worker.free_blocks, least=0),
                block_tokens=self._block_tokens_of(worker),
            )
        if not self._shelves:
            raise ConfigError("scheduler: there is no decode worker")

    async def place(self, *, num_tokens: int, deadline_s: float = 0.0) -> Placement:
        """Reserve room for `num_tokens` tokens on the worker that has most.

        Count the tokens that will be generated too. Waits up to `deadline_s` seconds for room.
        What is reserved must be given back with ``release``, once the request is through.

        Raises
        ------
        Busy
            If no worker had room by then.
        InvalidArgument
            If it is more than any worker will ever have.
        """
        num_tokens = check_count(num_tokens, low=0, high=_MOST_TOKENS, called="place: num_tokens")
        until = time.monotonic() + deadline_s
        while True:
            with self._lock:
                placement = self._reserve(num_tokens)
                if placement is not None:
                    return placement
                loop = asyncio.get_running_loop()
                waiter = (loop, loop.create_future())
                self._waiting.append(waiter)
            try:
                await asyncio.wait_for(waiter[1], max(0.0, until - time.monotonic()))
            except (asyncio.TimeoutError, TimeoutError):
                raise Busy(self._crowded(num_tokens, deadline_s)) from None
            finally:
                with self._lock:
                    self._waiting = [one for one in self._waiting if one is not waiter]

    async def hand_off(
        self,
        placement: Placement,
        *,
        blocks: Blocks,
        num_tokens: int | None = None,
        ttl_s: float = 30.0,
        label: str = "",
        payload: bytes = b"",
    ) -> HandOffReport:
        """Offer `blocks`, send the ticket to the placement's worker, and wait until it has read them.

        `num_tokens` is what has been prefilled, by default all that was placed. `blocks` may be
        used for something else once this returns or raises. After an error, and after a
        cancellation, the room has been given back and the offer is withdrawn.

        Raises
        ------
        InvalidArgument
            If the placement was given back already, or as in ``Node.offer``.
        KvlinkError
            The leaf that the offer failed with. What the worker's ``hand_off`` raises is passed on.
        """
        worker = self._worker_of(placement)
        started = time.monotonic()
        try:
            offer = self._node.offer(
                blocks,
                num_tokens=placement.num_tokens if num_tokens is None else num_tokens,
                ttl_s=ttl_s,
                label=label,
                payload=payload,
            )
            reply = await _deliver(worker, offer)
        except BaseException:
            self.release(placement)
            raise
        return HandOffReport(
            worker=worker.name,
            handoff=offer.id,
            seconds=time.monotonic() - started,
            phases_s=offer.phases_s,
            reply=reply,
        )

    def release(self, placement: Placement) -> None:
        """Give the room back, because the worker is done with the request. Idempotent."""
        with self._lock:
            shelf = self._shelves.get(placement.worker)
            if shelf is None or shelf.placements.pop(placement.number, None) is None:
                return
            for group, count in placement.blocks.items():
                shelf.free[group] += count
            waiting, self._waiting = self._waiting, []
        for loop, future in waiting:
            if not loop.is_closed():
                loop.call_soon_threadsafe(_wake, future)

    def free_blocks(self) -> dict[str, dict[str, int]]:
        """Return the blocks that the book says are free, by worker and group."""
        with self._lock:
            return {name: dict(shelf.free) for name, shelf in self._shelves.items()}

    def place_blocking(self, *, num_tokens: int, deadline_s: float = 0.0) -> Placement:
        """Do as ``place`` does, and block; not from inside an asyncio loop."""
        return _run(self.place(num_tokens=num_tokens, deadline_s=deadline_s))

    def hand_off_blocking(
        self,
        placement: Placement,
        *,
        blocks: Blocks,
        num_tokens: int | None = None,
        ttl_s: float = 30.0,
        label: str = "",
        payload: bytes = b"",
    ) -> HandOffReport:
        """Do as ``hand_off`` does, and block; not from inside an asyncio loop."""
        return _run(
            self.hand_off(placement, blocks=blocks, num_tokens=num_tokens, ttl_s=ttl_s, label=label, payload=payload)
        )

    def _by_group(
        self, worker: DecodeWorker, field_name: str, given: int | Mapping[str, int], *, least: int
    ) -> dict[str, int]:
        by_group = dict(given) if isinstance(given, Mapping) else dict.fromkeys(self._block_tokens, given)
        if set(by_group) != set(self._block_tokens):
            raise ConfigError(
                f"scheduler: worker {worker.name!r} has {field_name} for {sorted(by_group)}, "
                f"and the cache has groups {sorted(self._block_tokens)}"
            )
        for group, count in by_group.items():
            if isinstance(count, bool) or not isinstance(count, int) or count < least:
                raise ConfigError(f"scheduler: worker {worker.name!r} has {field_name}[{group!r}] = {count!r}")
        return by_group

    def _block_tokens_of(self, worker: DecodeWorker) -> dict[str, int | None]:
        if worker.block_tokens is None:
            return self._block_tokens
        told = self._by_group(worker, "block_tokens", worker.block_tokens, least=1)
        return {group: None if own is None else told[group] for group, own in self._block_tokens.items()}

    def _reserve(self, num_tokens: int) -> Placement | None:
        with_room = [shelf for shelf in self._shelves.values() if shelf.has_room(num_tokens)]
        if not with_room:
            self._check_possible(num_tokens)
            return None
        shelf = min(with_room, key=_Shelf.rank)
        placement = Placement(
            number=next(self._numbers),
            worker=shelf.worker.name,
            num_tokens=num_tokens,
            blocks=shelf.needed(num_tokens),
        )
        for group, count in placement.blocks.items():
            shelf.free[group] -= count
        shelf.placements[placement.number] = placement
        return placement

    def _check_possible(self, num_tokens: int) -> None:
        if any(shelf.could_have_room(num_tokens) for shelf in self._shelves.values()):
            return
        needed = {name: shelf.needed(num_tokens) for name, shelf in self._shelves.items()}
        raise InvalidArgument(
            f"place: {num_tokens} tokens need {needed} blocks, more than any decode worker has even when empty"
        )

    def _crowded(self, num_tokens: int, deadline_s: float) -> str:
        return (
            f"place: no decode worker got room for {num_tokens} tokens within {deadline_s:g} s; "
            f"free blocks are {self.free_blocks()}"
        )

    def _worker_of(self, placement: Placement) -> DecodeWorker:
        with self._lock:
            shelf = self._shelves.get(placement.worker)
            if shelf is None or placement.number not in shelf.placements:
                raise InvalidArgument(f"hand off to {placement.worker}: the placement was given back already")
            return shelf.worker


async def _deliver(worker: DecodeWorker, offer: Offer) -> Any:
    """Send the ticket and wait for the reading; when either fails, withdraw the offer."""
    sending = asyncio.ensure_future(_send(worker, offer.ticket))
    reading = asyncio.ensure_future(_outcome(offer))
    try:
        reply, _ = await asyncio.gather(sending, reading)
    except BaseException:
        offer.cancel()
        raise
    finally:
        sending.cancel()
        reading.cancel()
        await _see_released(offer)
    return reply


async def _see_released(offer: Offer) -> None:
    """Wait for it whatever happens, cancellation included: the caller will reuse the blocks."""
    released = asyncio.ensure_future(offer.until_released())
    cancelled = None
    while not released.done():
        try:
            await asyncio.shield(released)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


async def _send(worker: DecodeWorker, ticket: dict[str, Any]) -> Any:
    reply = worker.hand_off(ticket)
    return await reply if inspect.isawaitable(reply) else reply


async def _outcome(offer: Offer) -> None:
    await offer


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _run(work: Coroutine[Any, Any, _T]) -> _T:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    work.close()
    raise InvalidArgument("the blocking form would block the running asyncio loop: await the other one")
