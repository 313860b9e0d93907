"""Which decode worker a finished prefill goes to, and the whole way of handing it over.

The scheduler runs where prefill runs. It knows the decode workers, keeps a book of the blocks it has given out on
each, and for every handoff makes the offer, sends the ticket to the chosen worker, and waits until that worker has
read everything. How a ticket reaches a worker (a pipe, an HTTP request, the engine's own RPC) is the caller's: a
worker is a name, a number of free blocks and something to call with a ticket.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any

from kvlink.directory import Directory, Listing, WorkerEntry
from kvlink.errors import (
    AuthenticationFailed,
    Busy,
    Closed,
    ConfigError,
    DeadlineExceeded,
    InvalidArgument,
    KvlinkError,
    NotReady,
    PeerLost,
    PeerUnreachable,
    StalePeer,
)
from kvlink.handoff import Node, Push
from kvlink.handoff.arguments import check_count, check_seconds
from kvlink.handoff.block_tables import Blocks
from kvlink.scheduler.blocking import run_blocking
from kvlink.scheduler.book import Book, DecodeWorker, Placement, Shelf
from kvlink.scheduler.delivering import Parcel, hand_over
from kvlink.scheduler.messages import Reserved, unpack
from kvlink.scheduler.policies import MostRoom, Policy
from kvlink.scheduler.remote import Mover, NoRoom, OurFault, as_error
from kvlink.scheduler.reports import HandOffReport, Tried
from kvlink.scheduler.waiting import Waiter, Waiting

__all__ = ["Scheduler"]

_log = logging.getLogger("kvlink")

_MOST_TOKENS = (1 << 31) - 1

# How long a request waits for room until somebody is asked whether there is some, and then until the next is.
_FIRST_SLICES_S = (0.01, 0.02, 0.05, 0.1, 0.25)
_ASKING_PAUSE_S = 0.01
_ASKED_AT_ONCE = 8
# What says that a worker cannot be reached, rather than that it does not want this request.
_OUT_OF_REACH = (PeerLost, PeerUnreachable, StalePeer, DeadlineExceeded, AuthenticationFailed, NotReady, Closed)


class Scheduler:
    """Places requests on decode workers and hands them over. Thread-safe.

    Awaitable methods come in a blocking form too, for programs without an asyncio loop.

    Parameters
    ----------
    node
        The prefill side's node, which makes the offers.
    workers
        Decode workers that are reached by the program's own means.
    directory
        Where to find decode workers that run a ``DecodeService``: they come and go by themselves,
        and what one of them does not take goes to another.
    policy
        Who is preferred, ``MostRoom`` by default; see ``kvlink.scheduler.policies``.
    ranks
        ``node.descriptor`` of this engine's other ranks: each has a part of every request, and
        pushes it into what ``begin`` has reserved for all of them.

    Raises
    ------
    ConfigError
        If there is neither a worker nor a directory, two workers share a name, or what one says of
        its blocks does not fit the groups.
    InvalidArgument
        If one of `ranks` is no descriptor, is `node` itself, or appears twice.
    """

    def __init__(
        self,
        node: Node,
        *,
        workers: Sequence[DecodeWorker] = (),
        directory: Directory | None = None,
        policy: Policy | None = None,
        ranks: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._node = node
        self._block_tokens = {
            group.name: None if group.slots else group.block_tokens for group in node.cache.layout.groups
        }
        self._lock = threading.Lock()
        self._book = Book(MostRoom() if policy is None else policy)
        self._waiting = Waiting()
        self._mover = Mover(node, ranks)
        self._listed: dict[str, Shelf] = {}  # by epoch; those whose groups are others have none
        self._is_fixed = directory is None
        self._ask_again_at = 0.0
        for worker in workers:
            self.add_worker(worker)
        if directory is None and not self._book.shelves():
            raise ConfigError("scheduler: there is no decode worker")
        self._unwatch = directory.watch(self._on_listing) if directory is not None else None

    def close(self) -> None:
        """Hear no more of the directory, and let go of threads. Idempotent."""
        if self._unwatch is not None:
            self._unwatch()
        self._mover.close()

    def add_worker(self, worker: DecodeWorker) -> None:
        """Use one more decode worker from now on.

        Raises
        ------
        ConfigError
            If its name is taken, or what it says of its blocks does not fit the groups.
        """
        capacity = worker.capacity(self._block_tokens)
        block_tokens = worker.block_sizes(self._block_tokens)
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
                placement = self._book.place(num_tokens, prefix_hashes, priority=priority)
                if placement is not None:
                    return placement
            self._check_possible(num_tokens)
        until = time.monotonic() + deadline_s
        waiter = Waiter(num_tokens, prefix_hashes, priority=priority, until=until)
        return await self._wait_for_room(waiter, deadline_s)

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
        """Bring `blocks` to the placement's worker, and wait until it has them.

        `num_tokens` is what has been prefilled, by default all that was placed. `blocks` may be used for something
        else once this returns or raises. After an error, and after a cancellation, the room has been given back and
        nobody reads them any more.

        A ``DecodeWorker`` is sent the ticket of an offer. Workers of a directory reserve blocks, and are pushed to;
        they know themselves what they have, so that the room is theirs to give back, and ``release`` does nothing.
        If one of them refuses, fails or falls silent, the request is placed anew, on another one, as often as it
        takes within `ttl_s` seconds. It arrives at one at most. What a worker has of its prefix is not moved.

        Raises
        ------
        InvalidArgument
            If the placement was given back already, `num_tokens` is more than was placed, the engine has
            other ranks, or as in ``Node.offer`` and ``Node.push``.
        KvlinkError
            The leaf that the last try failed with; its message tells all of them. What a
            ``DecodeWorker``'s ``hand_off`` raises is passed on.
        """
        self._mover.check_alone("hand off")
        num_tokens = placement.num_tokens if num_tokens is None else num_tokens
        check_count(num_tokens, low=0, high=placement.num_tokens, called="hand off: num_tokens")
        parcel = Parcel.of(placement, blocks, num_tokens, payload=payload, label=label)
        until = time.monotonic() + check_seconds(ttl_s, called="hand off: ttl_s")
        worker = self._worker_of(placement)
        if isinstance(worker, DecodeWorker):
            try:
                return await hand_over(self._node, worker, parcel, ttl_s=ttl_s)
            except BaseException:
                self.release(placement)
                raise
        started = time.monotonic()
        move = partial(self._mover.move, parcel=parcel, until=until)
        push, tried = await self._hand_on(placement, parcel, until, move)
        return HandOffReport(
            worker=push.target,
            handoff=push.id,
            seconds=time.monotonic() - started,
            phases_s=push.phases_s,
            skipped_tokens=push.skip_tokens,
            tried=tuple(tried),
        )

    async def begin(
        self,
        placement: Placement,
        *,
        blocks: Blocks,
        num_tokens: int,
        ttl_s: float = 30.0,
        label: str = "",
    ) -> Push:
        """Reserve at the placement's worker, or another one if that refuses, for prefill that still runs.

        Returns a push that has begun with the first `blocks` of `num_tokens` tokens: say ``add``, ``ready`` and
        ``commit`` to it. It stays with its worker; if it fails, place the request again. Other ranks of the engine
        push their parts into ``push.ticket``. Only workers of a directory are pushed to; their room is theirs to
        give back.

        Raises
        ------
        InvalidArgument
            As in ``hand_off``, or if the placement is on a ``DecodeWorker``.
        KvlinkError
            The leaf that the last try to reserve failed with; its message tells all of them.
        """
        check_count(num_tokens, low=0, high=placement.num_tokens, called="begin: num_tokens")
        until = time.monotonic() + check_seconds(ttl_s, called="begin: ttl_s")
        if isinstance(self._worker_of(placement), DecodeWorker):
            raise InvalidArgument(f"begin at {placement.worker}: only workers of a directory can be pushed to")
        parcel = Parcel.of(placement, blocks, num_tokens, label=label)
        reserve = partial(self._mover.begin, parcel=parcel, until=until)
        push, _ = await self._hand_on(placement, parcel, until, reserve)
        return push

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
        return run_blocking(
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
        return run_blocking(
            self.hand_off(placement, blocks=blocks, num_tokens=num_tokens, ttl_s=ttl_s, label=label, payload=payload)
        )

    async def _hand_on(
        self, placement: Placement, parcel: Parcel, until: float, attempt: Callable[..., Awaitable[Push]]
    ) -> tuple[Push, list[Tried]]:
        """Try one worker of the directory after the other."""
        tried: list[Tried] = []
        avoided: list[Shelf] = []
        while True:
            began = time.monotonic()
            shelf = self._book.shelf(placement)
            try:
                if shelf is None or not isinstance(shelf.worker, WorkerEntry):
                    raise PeerLost(f"{placement.worker} has left the directory")
                return await attempt(shelf.worker, answered=partial(self._on_answer, placement, shelf)), tried
            except OurFault as fault:
                raise fault.error from None
            except (KvlinkError, NoRoom) as error:
                if self._node.closed:
                    raise
                tried.append(Tried(worker=placement.worker, seconds=time.monotonic() - began, error=as_error(error)))
                if shelf is not None and isinstance(error, _OUT_OF_REACH):
                    self._avoid(shelf)
                if shelf is not None and (not isinstance(error, NoRoom) or shelf.has_room(parcel.room_tokens)):
                    avoided.append(shelf)
            finally:
                self.release(placement)
            placement = await self._place_again(placement, avoided, tried, until)

    async def _place_again(
        self, placement: Placement, avoided: Sequence[Shelf], tried: Sequence[Tried], until: float
    ) -> Placement:
        waiter = Waiter(
            placement.num_tokens,
            placement.prefix_hashes,
            without=tuple(avoided),
            priority=placement.priority,
            until=until,
        )
        try:
            return await self._wait_for_room(waiter, until - time.monotonic())
        except Busy:
            told = "; ".join(f"{one.worker} after {one.seconds:.2f} s: {one.error}" for one in tried)
            raise type(tried[-1].error)(f"hand off: no decode worker took it in time. Tried {told}") from None

    def _avoid(self, shelf: Shelf) -> None:
        with self._lock:
            self._book.avoid(shelf)

    def _on_answer(self, placement: Placement, shelf: Shelf, reserved: Reserved) -> None:
        """Note how a worker stands. What was promised here is now its own to count, or was refused."""
        with self._lock:
            self._tell(shelf, reserved)
            self._book.release(placement)
            served = self._waiting.serve(self._book)
        _wake(served)

    def _tell(self, shelf: Shelf, standing: Reserved) -> None:
        if set(standing.free_blocks) == set(shelf.capacity):
            shelf.failures = 0
            self._book.tell(shelf, free=standing.free_blocks, load=standing.load)

    def _on_listing(self, listing: Listing) -> None:
        """Take over what a directory says, in one of its threads."""
        with self._lock:
            gone = self._listed.keys() - listing.workers.keys()
            for epoch in gone:
                self._book.remove(self._listed.pop(epoch))
            for epoch, entry in listing.workers.items():
                shelf = self._listed.get(epoch)
                if shelf is None:
                    self._list(entry)
                elif shelf.worker != entry:
                    shelf.worker = entry
                    self._book.tell(shelf, free=entry.free_blocks, load=entry.load)
            served = self._waiting.serve(self._book)
        _wake(served)
        for epoch in gone:
            self._mover.forget(epoch)

    def _list(self, entry: WorkerEntry) -> None:
        if set(entry.blocks) != set(self._block_tokens):
            _log.info("scheduler: %s has groups %s, not those of this cache", entry.name, sorted(entry.blocks))
            return
        self._listed[entry.epoch] = self._book.add(
            entry,
            capacity=dict(entry.blocks),
            block_tokens={group: tokens or None for group, tokens in entry.block_tokens.items()},
            free=entry.free_blocks,
            load=entry.load,
        )

    async def _wait_for_room(self, waiter: Waiter, deadline_s: float) -> Placement:
        with self._lock:
            self._waiting.add(waiter)
            served = self._waiting.serve(self._book)
        _wake(served)
        try:
            await self._until_served(waiter, time.monotonic() + deadline_s)
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

    async def _until_served(self, waiter: Waiter, until: float) -> None:
        """Wait for room; raises ``TimeoutError``.

        Workers of a static list do not say when they have room again, nor does one that is left out
        for a while: they are asked now and then.
        """
        for slice_s in itertools.chain(_FIRST_SLICES_S, itertools.repeat(_FIRST_SLICES_S[-1])):
            if waiter.placement is not None:
                return
            remaining_s = max(0.0, until - time.monotonic())
            if self._is_fixed or remaining_s <= slice_s:
                await waiter.wait(remaining_s)
                return
            with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
                await waiter.wait(slice_s)
                return
            self._look_again()

    def _look_again(self) -> None:
        now = time.monotonic()
        with self._lock:
            silent = []
            if now >= self._ask_again_at:
                self._ask_again_at = now + _ASKING_PAUSE_S
                silent = self._book.to_be_asked(_ASKED_AT_ONCE, before=now - _ASKING_PAUSE_S)
            for shelf in silent:
                shelf.is_asked = True
            served = self._waiting.serve(self._book)
        _wake(served)
        for shelf in silent:
            assert isinstance(shelf.worker, WorkerEntry)
            self._mover.ask_standing(shelf.worker).add_done_callback(partial(self._on_standing, shelf))

    def _on_standing(self, shelf: Shelf, asked: Future[bytes]) -> None:
        """Note how a worker stands, in the thread that has asked."""
        shelf.is_asked = False
        try:
            standing = unpack(asked.result(), Reserved)
        except (KvlinkError, CancelledError):
            self._avoid(shelf)
            return
        with self._lock:
            self._tell(shelf, standing)
            served = self._waiting.serve(self._book)
        _wake(served)

    def _leave(self, waiter: Waiter) -> None:
        with self._lock:
            self._waiting.leave(waiter)
            served = self._waiting.serve(self._book)  # those whom it kept from passing
        _wake(served)

    def _named(self, name: str) -> Shelf | None:
        return next((shelf for shelf in self._book.shelves() if shelf.name == name), None)

    def _check_possible(self, num_tokens: int) -> None:
        if not self._is_fixed or self._book.could_have_room(num_tokens):
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

    def _worker_of(self, placement: Placement) -> DecodeWorker | WorkerEntry | None:
        """Return the placement's worker; ``None`` for one of the directory that has left it."""
        with self._lock:
            shelf = self._book.shelf(placement)
            if shelf is None and not self._is_fixed:
                return None
            if shelf is None or not self._book.holds(placement):
                raise InvalidArgument(f"hand off to {placement.worker}: the placement was given back already")
            return shelf.worker


def _wake(served: Sequence[Waiter]) -> None:
    for waiter in served:
        waiter.wake()
