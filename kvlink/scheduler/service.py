"""The decode worker's end of a scheduler: takes requests that it has room for, and says when they are here."""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

import msgspec

from kvlink.directory import Directory, Registration, WorkerEntry
from kvlink.errors import ConfigError, InvalidArgument, NotReady, OutOfMemory
from kvlink.handoff import BlockPool, Node, Slot
from kvlink.handoff.answer import Question
from kvlink.handoff.asking import answer
from kvlink.handoff.following import Follower
from kvlink.handoff.handles import Handle
from kvlink.handoff.ticket import TicketSource
from kvlink.scheduler.messages import RESERVE, STAND, WITHDRAW, Reserve, Reserved, Withdraw, pack, unpack

__all__ = ["Allocator", "Arrival", "DecodeService", "PoolAllocator", "PrefixAllocator"]

_log = logging.getLogger("kvlink")

# Answers that are remembered after their requests have ended, for a scheduler that asks again.
_REMEMBERED = 4096
_CLOSE_S = 5.0


class Allocator(Protocol):
    """The engine's own allocator of blocks. Called from threads of the service, one call at a time; must not wait."""

    def try_allocate(self, counts: Mapping[str, int]) -> Mapping[str, Sequence[int]] | None:
        """Return so many blocks of each group, or ``None`` if there are not enough."""

    def free(self, blocks: Mapping[str, Sequence[int]]) -> None:
        """Take back what ``try_allocate`` has given: nothing uses it any more."""

    def free_blocks(self) -> Mapping[str, int]:
        """Return how many blocks of each group could be allocated now."""


@runtime_checkable
class PrefixAllocator(Allocator, Protocol):
    """An ``Allocator`` that keeps the cache of earlier requests, and knows it by its hashes."""

    def try_allocate_after(
        self, counts: Mapping[str, int], prefix_hashes: Sequence[int | bytes]
    ) -> tuple[Mapping[str, Sequence[int]], int] | None:
        """Return blocks as ``try_allocate`` does, and for how many tokens the first of them are right already.

        `prefix_hashes` are those that the request was placed with, as far as they are numbers of 64 bits or
        bytes. Blocks that lie within those tokens are not written: they may be in several requests at once, and
        each ``free`` lets go of them once. What they hold must not change before.
        """


class PoolAllocator:
    """An ``Allocator`` over a ``kvlink.BlockPool`` for each group. Thread-safe."""

    def __init__(self, pools: Mapping[str, BlockPool]) -> None:
        self._pools = dict(pools)
        self._lock = threading.RLock()

    def try_allocate(self, counts: Mapping[str, int]) -> dict[str, tuple[int, ...]] | None:
        """See ``Allocator``."""
        taken: dict[str, tuple[int, ...]] = {}
        with self._lock:
            for group, count in counts.items():
                try:
                    taken[group] = self._pools[group].allocate(count)
                except OutOfMemory:
                    self.free(taken)
                    return None
        return taken

    def free(self, blocks: Mapping[str, Sequence[int]]) -> None:
        """See ``Allocator``."""
        for group, given in blocks.items():
            self._pools[group].free(given)

    def free_blocks(self) -> dict[str, int]:
        """See ``Allocator``."""
        return {group: pool.num_free for group, pool in self._pools.items()}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrival:
    """A request whose cache is here.

    Attributes
    ----------
    label
        The user's name for it.
    handoff
        Its id, as peers and logs have it.
    source
        Name of the node that handed it over.
    blocks
        Where it lies, by group, with room for all of `room_tokens`.
    num_tokens
        Tokens that have arrived.
    room_tokens
        Tokens that there is room for.
    payload
        Small bytes that came along: the first token and the like.
    cached_tokens
        Of `num_tokens`, those from the start that were here already, as the allocator said.
    """

    label: str
    handoff: str
    source: str
    blocks: Mapping[str, Sequence[int]]
    num_tokens: int
    room_tokens: int
    payload: bytes
    cached_tokens: int = 0


# A scheduler's life, and its id of the try.
_Key = tuple[bytes, str]


@dataclass(slots=True, kw_only=True, eq=False)
class _Taken:
    """A request that was accepted, until its blocks are the engine's or free again."""

    key: _Key
    slot: Slot
    reserve: Reserve
    source: str
    blocks: Mapping[str, Sequence[int]]
    cached_tokens: int
    has_ended: bool = False
    has_arrived: bool = False


class DecodeService:
    """Answers the schedulers of prefill workers, in threads of its own. Thread-safe.

    A request is taken if `allocator` has blocks for it. They are reserved for the prefill worker to
    push into, and once it has, `on_ready` hears of it; from then on the blocks are the engine's,
    which calls ``finish`` when it is through. If nothing comes, or it fails, they go back to the
    allocator as soon as they are released; so they do if the prefill worker dies before it pushes. With a
    ``PrefixAllocator`` what is here already is not pushed again.

    Parameters
    ----------
    node
        The decode side's node; borrowed, and closed after the service.
    allocator
        The engine's own; ``PoolAllocator`` makes one.
    on_ready
        Called with each arrival in a thread of the service; must not wait. What it raises is logged,
        and the request's blocks go back.
    directory
        Where this worker is listed while the service is open.
    most_requests
        Requests that may be here at once, those that are still to come included.

    Raises
    ------
    ConfigError
        If the allocator knows other groups than the node's cache has, or `most_requests` is no count.
    """

    def __init__(
        self,
        node: Node,
        allocator: Allocator,
        *,
        on_ready: Callable[[Arrival], None],
        directory: Directory | None = None,
        most_requests: int = 4096,
    ) -> None:
        self._node = node
        self._allocator = allocator
        self._on_ready = on_ready
        self._most = most_requests
        self._groups = list(node.cache.layout.groups)
        if set(allocator.free_blocks()) != {group.name for group in self._groups}:
            raise ConfigError(
                f"decode service: the allocator has groups {sorted(allocator.free_blocks())}, "
                f"and the cache has {sorted(group.name for group in self._groups)}"
            )
        if most_requests < 1:
            raise ConfigError(f"decode service: most_requests is {most_requests!r}; it must be at least 1")
        self._lock = threading.RLock()
        self._taken: dict[_Key, _Taken] = {}  # that are not released
        self._by_slot: dict[Handle, _Taken] = {}  # the same
        # Of requests that are not here any more, or were never to come: tickets for those who ask again. The latest.
        self._ended: OrderedDict[_Key, dict[str, Any] | None] = OrderedDict()
        self._arrived: set[Arrival] = set()
        self._counts: Counter[str] = Counter(accepted=0, refused=0, arrived=0, failed=0)
        self._closed = False
        self._registration: Registration | None = None
        self._follower = Follower(node, self._happened)
        try:
            if directory is not None:
                self._registration = directory.register(self.entry)
        except BaseException:
            self._follower.close(deadline_s=0.0)
            raise
        answer(node, RESERVE, self._answer)
        answer(node, WITHDRAW, self._withdraw)
        answer(node, STAND, lambda _: pack(self._standing(None)))

    def __enter__(self) -> DecodeService:
        """Return the service, to be closed at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    def entry(self) -> WorkerEntry:
        """Return how this worker stands, as directories list it.

        Raises
        ------
        NotReady
            If it takes nothing new now, so that it should not be listed.
        """
        state = self._node.state
        if self._closed or state in ("draining", "suspended", "closed"):
            raise NotReady(f"{self._node.name} is {'closing' if self._closed else state}: it takes no requests")
        with self._lock:
            return WorkerEntry(
                name=self._node.name,
                address=self._node.address,
                epoch=self._node.epoch,
                blocks={group.name: group.num_blocks for group in self._groups},
                free_blocks=dict(self._allocator.free_blocks()),
                block_tokens={group.name: 0 if group.slots else group.block_tokens for group in self._groups},
                window_bytes=self._node.limits.node_window_bytes,
                load=self._load(),
            )

    def finish(self, arrival: Arrival) -> None:
        """Give back the blocks of a request that is through. Idempotent."""
        with self._lock:
            if arrival not in self._arrived:
                return
            self._arrived.remove(arrival)
            self._allocator.free(arrival.blocks)
        self.changed()

    def changed(self) -> None:
        """Say that more or fewer blocks are free than before, where the engine allocates some itself."""
        if self._registration is not None:
            self._registration.changed()

    def counters(self) -> dict[str, int]:
        """Return how many requests were accepted, refused, have arrived and have failed."""
        with self._lock:
            return dict(self._counts)

    def close(self, *, deadline_s: float = _CLOSE_S) -> None:
        """Take nothing more, leave the directory, and see what was taken through, at most `deadline_s` seconds.

        Idempotent. Requests that have arrived stay the engine's.
        """
        self._closed = True
        if self._registration is not None:
            self._registration.close()
        self._follower.close(deadline_s=deadline_s)

    def _answer(self, question: Question) -> bytes:
        reserve = unpack(question.body, Reserve)
        key = question.epoch, reserve.request
        with self._lock:
            if key in self._taken:  # asked again, since the first answer was lost
                ticket: dict[str, Any] | None = self._taken[key].slot.ticket
            elif key in self._ended:
                ticket = self._ended[key]
            else:
                ticket = self._take(key, question, reserve)
                self._counts["accepted" if ticket is not None else "refused"] += 1
            reserved = self._standing(ticket)
        self.changed()
        return pack(reserved)

    def _standing(self, ticket: dict[str, Any] | None) -> Reserved:
        with self._lock:
            return Reserved(ticket=ticket, free_blocks=dict(self._allocator.free_blocks()), load=self._load())

    def _withdraw(self, question: Question) -> bytes:
        withdraw = unpack(question.body, Withdraw)
        key = question.epoch, withdraw.request
        with self._lock:
            taken = self._taken.get(key)
            if taken is None:
                self._remember(key, None)  # it may be on its way still
        if taken is not None:
            taken.slot.cancel()
        return b""

    def _take(self, key: _Key, question: Question, reserve: Reserve) -> dict[str, Any] | None:
        """Reserve blocks, and return the ticket to push with if there were some."""
        if self._closed:
            raise NotReady(f"{self._node.name} takes no more requests: ask another worker")
        if reserve.num_tokens > reserve.room_tokens:
            raise InvalidArgument(f"{reserve.num_tokens} tokens do not fit into room for {reserve.room_tokens}")
        if self._load() >= self._most:
            return None
        allocated = self._allocate(reserve)
        if allocated is None:
            return None
        blocks, cached_tokens = allocated
        # Whoever asks is who pushes, maybe with others. Named, the death of one ends the reservation.
        asker = TicketSource(name=question.name, address=question.address, epoch=question.epoch.hex())
        try:
            slot = self._node.reserve(
                blocks,
                num_tokens=reserve.num_tokens,
                skip_tokens=cached_tokens,
                ttl_s=reserve.ttl_ms / 1000,
                label=reserve.label,
                sources=[msgspec.to_builtins(source) for source in (asker, *reserve.sources)],
            )
        except BaseException:
            self._allocator.free(blocks)
            raise
        taken = _Taken(
            key=key, slot=slot, reserve=reserve, source=question.name, blocks=blocks, cached_tokens=cached_tokens
        )
        self._taken[key] = self._by_slot[slot] = taken
        self._follower.follow(slot)
        return slot.ticket

    def _allocate(self, reserve: Reserve) -> tuple[Mapping[str, Sequence[int]], int] | None:
        """Return blocks for a request, and for how many of its tokens they are right already."""
        needed = self._needed(reserve.room_tokens)
        if reserve.prefix_hashes and isinstance(self._allocator, PrefixAllocator):
            allocated = self._allocator.try_allocate_after(needed, reserve.prefix_hashes)
            return None if allocated is None else (allocated[0], min(allocated[1], reserve.num_tokens))
        blocks = self._allocator.try_allocate(needed)
        return None if blocks is None else (blocks, 0)

    def _needed(self, room_tokens: int) -> dict[str, int]:
        return {
            group.name: min(room_tokens, 1) if group.slots else -(-room_tokens // group.block_tokens)
            for group in self._groups
        }

    def _load(self) -> int:
        return len(self._arrived) + sum(not taken.has_ended for taken in self._taken.values())

    def _happened(self, handle: Handle, released: bool) -> None:
        if released:
            self._released(handle)
        else:
            self._ended_with(handle)

    def _ended_with(self, slot: Handle) -> None:
        with self._lock:
            taken = self._by_slot[slot]
            taken.has_ended = True
            if slot.error is not None:
                _log.info("request %r of %s did not arrive: %s", taken.reserve.label, taken.source, slot.error)
                self._counts["failed"] += 1
                return
            taken.has_arrived = True
            self._counts["arrived"] += 1
            arrival = Arrival(
                label=taken.reserve.label,
                handoff=slot.id,
                source=taken.source,
                blocks=taken.blocks,
                num_tokens=taken.reserve.num_tokens,
                room_tokens=taken.reserve.room_tokens,
                payload=taken.slot.payload,
                cached_tokens=taken.cached_tokens,
            )
            self._arrived.add(arrival)
        try:
            self._on_ready(arrival)
        except BaseException:
            self.finish(arrival)  # nobody has taken it over
            raise

    def _released(self, slot: Handle) -> None:
        with self._lock:
            taken = self._by_slot.pop(slot)
            del self._taken[taken.key]
            self._remember(taken.key, taken.slot.ticket)
            if not taken.has_arrived:
                self._allocator.free(taken.blocks)
        self.changed()

    def _remember(self, key: _Key, ticket: dict[str, Any] | None) -> None:
        self._ended[key] = ticket
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
