"""Which decode worker a finished prefill goes to, and the whole way of handing it over.

The scheduler runs where prefill runs. It knows the decode workers, keeps a book of the
blocks it has given out on each, and for every handoff makes the offer, sends the ticket to the
chosen worker, and waits until that worker has read everything. How a ticket reaches a worker (a
pipe, an HTTP request, the engine's own RPC) is the caller's: a worker is a name, a number of free
blocks and something to call with a ticket.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Coroutine, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kvlink.errors import Busy, ConfigError, InvalidArgument
from kvlink.handoff import Node, Offer
from kvlink.handoff.arguments import check_count
from kvlink.handoff.block_tables import Blocks
from kvlink.scheduler.book import Book, DecodeWorker, Placement, Shelf
from kvlink.scheduler.policies import MostRoom, Policy
from kvlink.scheduler.waiting import Waiter, Waiting

__all__ = ["HandOffReport", "Scheduler"]

_MOST_TOKENS = (1 << 31) - 1

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOffReport:
    """How one handoff went; ``reply`` is what the worker's ``hand_off`` returned."""

    worker: str
    handoff: str
    seconds: float
    phases_s: Mapping[str, float]
    reply: Any


class Scheduler:
    """Places requests on decode workers and hands them over. Thread-safe.

    Awaitable methods come in a blocking form too, for programs without an asyncio loop.

    Parameters
    ----------
    node
        The prefill side's node, which makes the offers.
    workers
        The decode workers to begin with.
    policy
        Who is preferred, ``MostRoom`` by default; see ``kvlink.scheduler.policies``.

    Raises
    ------
    ConfigError
        If there is no worker, two share a name, or what one says of its blocks does not fit the groups.
    """

    def __init__(self, node: Node, *, workers: Sequence[DecodeWorker], policy: Policy | None = None) -> None:
        self._node = node
        self._block_tokens = {
            group.name: None if group.slots else group.block_tokens for group in node.cache.layout.groups
        }
        self._lock = threading.Lock()
        self._book = Book(MostRoom() if policy is None else policy)
        self._waiting = Waiting()
        for worker in workers:
            self.add_worker(worker)
        if not self._book.shelves():
            raise ConfigError("scheduler: there is no decode worker")

    def add_worker(self, worker: DecodeWorker) -> None:
        """Use one more decode worker from now on.

        Raises
        ------
        ConfigError
            If its name is taken, or what it says of its blocks does not fit the groups.
        """
        capacity = self._by_group(worker, "free_blocks", worker.free_blocks, least=0)
        block_tokens = self._block_tokens_of(worker)
        with self._lock:
            if self._named(worker.name) is not None:
                raise ConfigError(f"scheduler: two workers are called {worker.name!r}")
            self._book.add(worker, capacity=capacity, block_tokens=block_tokens)
            served = self._waiting.serve(self._book)
        _wake(served)

    def remove_worker(self, name: str) -> None:
        """Place nothing more on a worker. What is being handed to it goes on. Idempotent."""
        with self._lock:
            shelf = self._named(name)
            if shelf is not None:
                self._book.remove(shelf)

    async def place(
        self,
        *,
        num_tokens: int,
        prefix_hashes: Sequence[Hashable] = (),
        priority: int = 0,
        deadline_s: float = 0.0,
    ) -> Placement:
        """Reserve room for `num_tokens` tokens on the worker that the policy prefers.

        Count the tokens that will be generated too. Waits up to `deadline_s` seconds for room: those
        of a higher `priority` come first, and of one priority those whose deadline is earliest. Who
        does not fit anywhere yet is passed by a few that do. What is reserved must be given back
        with ``release``, once the request is through.

        `prefix_hashes` are for policies that know who has which prefix: one hash for each block of
        the prompt, each of everything up to there.

        Raises
        ------
        Busy
            If no worker had room by then, or too many wait already.
        InvalidArgument
            If it is more than any worker will ever have.
        """
        num_tokens = check_count(num_tokens, low=0, high=_MOST_TOKENS, called="place: num_tokens")
        with self._lock:
            if not self._waiting:  # else whoever waits goes first
                placement = self._book.place(num_tokens, prefix_hashes)
                if placement is not None:
                    return placement
            self._check_possible(num_tokens)
            until = time.monotonic() + deadline_s
            waiter = Waiter(num_tokens, prefix_hashes, frozenset(), priority=priority, until=until)
            self._waiting.add(waiter)
            served = self._waiting.serve(self._book)
        _wake(served)
        return await self._served(waiter, deadline_s)

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
            if not self._book.release(placement):
                return
            served = self._waiting.serve(self._book)
        _wake(served)

    def free_blocks(self) -> dict[str, dict[str, int]]:
        """Return the blocks that the book says are free, by worker and group."""
        with self._lock:
            return {shelf.name: shelf.free() for shelf in self._book.shelves()}

    def place_blocking(
        self,
        *,
        num_tokens: int,
        prefix_hashes: Sequence[Hashable] = (),
        priority: int = 0,
        deadline_s: float = 0.0,
    ) -> Placement:
        """Do as ``place`` does, and block; not from inside an asyncio loop."""
        return _run(
            self.place(num_tokens=num_tokens, prefix_hashes=prefix_hashes, priority=priority, deadline_s=deadline_s)
        )

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

    async def _served(self, waiter: Waiter, deadline_s: float) -> Placement:
        try:
            if waiter.placement is None:
                await waiter.wait(max(0.0, deadline_s))
        except (asyncio.TimeoutError, TimeoutError):
            self._leave(waiter)  # room may have come in this very moment
        except BaseException:
            self._leave(waiter)
            if waiter.placement is not None:
                self.release(waiter.placement)
            raise
        if waiter.placement is None:
            raise Busy(self._crowded(waiter.num_tokens, deadline_s))
        return waiter.placement

    def _leave(self, waiter: Waiter) -> None:
        with self._lock:
            self._waiting.leave(waiter)
            served = self._waiting.serve(self._book)  # those whom it kept from passing
        _wake(served)

    def _named(self, name: str) -> Shelf | None:
        return next((shelf for shelf in self._book.shelves() if shelf.name == name), None)

    def _check_possible(self, num_tokens: int) -> None:
        if self._book.could_have_room(num_tokens):
            return
        needed = {shelf.name: shelf.needed(num_tokens) for shelf in self._book.shelves()}
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
            shelf = self._book.shelf(placement.shelf)
            if shelf is None or not self._book.holds(placement):
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


def _wake(served: Sequence[Waiter]) -> None:
    for waiter in served:
        waiter.wake()


def _run(work: Coroutine[Any, Any, _T]) -> _T:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    work.close()
    raise InvalidArgument("the blocking form would block the running asyncio loop: await the other one")
