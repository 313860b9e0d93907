"""The book of the workers: what each has, what is promised there, and who is next."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvlink.directory import WorkerEntry
from kvlink.errors import ConfigError
from kvlink.scheduler.policies import Policy, WorkerState
from kvlink.scheduler.standings import Standings

__all__ = ["Book", "DecodeWorker", "Placement", "Shelf"]

_ANY_LENGTH = 1 << 62
# How long a worker is left out after it could not be reached.
_AVOIDED_S = 0.5
_LONGEST_AVOIDED_S = 30.0
_MOST_FAILURES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeWorker:
    """A decode worker that is reached by the program's own means.

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

    def capacity(self, groups: Mapping[str, int | None]) -> dict[str, int]:
        """Return its blocks by group. Raises ``ConfigError`` if they do not fit `groups`."""
        return self._by_group("free_blocks", self.free_blocks, groups, least=0)

    def block_sizes(self, groups: Mapping[str, int | None]) -> dict[str, int | None]:
        """Return its tokens a block by group, ``None`` for slots. Raises ``ConfigError`` likewise."""
        if self.block_tokens is None:
            return dict(groups)
        told = self._by_group("block_tokens", self.block_tokens, groups, least=1)
        return {group: None if own is None else told[group] for group, own in groups.items()}

    def _by_group(
        self, field_name: str, given: int | Mapping[str, int], groups: Mapping[str, int | None], *, least: int
    ) -> dict[str, int]:
        by_group = dict(given) if isinstance(given, Mapping) else dict.fromkeys(groups, given)
        if set(by_group) != set(groups):
            raise ConfigError(
                f"scheduler: worker {self.name!r} has {field_name} for {sorted(by_group)}, "
                f"and the cache has groups {sorted(groups)}"
            )
        for group, count in by_group.items():
            if isinstance(count, bool) or not isinstance(count, int) or count < least:
                raise ConfigError(f"scheduler: worker {self.name!r} has {field_name}[{group!r}] = {count!r}")
        return by_group


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Room reserved on one worker, until ``Scheduler.release``.

    Attributes
    ----------
    number
        Its own.
    worker
        Name of the worker.
    num_tokens
        Tokens that there is room for.
    blocks
        Blocks that these need, by group.
    shelf
        The scheduler's own name for the worker, since names may repeat.
    prefix_hashes, priority
        What it was placed by, for when it has to go elsewhere.
    """

    number: int
    worker: str
    num_tokens: int
    blocks: Mapping[str, int]
    shelf: int = -1
    prefix_hashes: Sequence[Hashable] = ()
    priority: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class Shelf:
    """One worker. Groups without ``block_tokens`` have slots, of which a request takes one.

    What is free is what the worker has told, less what was promised here and it cannot know of yet.
    """

    key: int
    number: int  # in the standings: given to another worker once this one has gone
    name: str
    worker: DecodeWorker | WorkerEntry
    capacity: dict[str, int]
    block_tokens: dict[str, int | None]
    told_free: dict[str, int]
    told_load: int = 0
    told_at: float = field(default_factory=time.monotonic)
    is_asked: bool = False  # how it stands, just now
    failures: int = 0  # in a row, of getting anything to it
    avoided_until: float = 0.0
    promised: dict[str, int] = field(init=False)
    placements: dict[int, Placement] = field(default_factory=dict)  # that the worker does not know of

    def __post_init__(self) -> None:
        self.promised = dict.fromkeys(self.capacity, 0)

    def needed(self, num_tokens: int) -> dict[str, int]:
        """Return the blocks that so many tokens take here."""
        return {
            group: min(num_tokens, 1) if block_tokens is None else -(-num_tokens // block_tokens)
            for group, block_tokens in self.block_tokens.items()
        }

    def free(self) -> dict[str, int]:
        """Return the blocks that may be promised."""
        return {group: max(0, count - self.promised[group]) for group, count in self.told_free.items()}

    def could_have_room(self, num_tokens: int) -> bool:
        """Return whether it fits while nothing else is here."""
        return all(self.capacity[group] >= count for group, count in self.needed(num_tokens).items())

    def has_room(self, num_tokens: int) -> bool:
        """Return whether so many tokens fit now."""
        return self.state().room_tokens >= num_tokens

    def state(self) -> WorkerState:
        """Return how it stands."""
        room = _ANY_LENGTH
        for group, tokens in self.block_tokens.items():
            free = self.told_free[group] - self.promised[group]
            if tokens is not None:
                room = min(room, free * tokens)
            elif free <= 0:
                room = 0  # one slot does for any length, but it takes that one
        return WorkerState(self.number, max(0, room), self.told_load + len(self.placements))


class Book:
    """All workers, and what is promised on them. Not thread-safe.

    Parameters
    ----------
    policy
        Who is preferred.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._standings = Standings()
        self._shelves: dict[int, Shelf] = {}  # by key
        self._by_number: dict[int, Shelf] = {}
        self._keys = itertools.count(1)
        self._numbers = itertools.count()
        self._spare_numbers: list[int] = []  # of workers that went: workers come and go for years
        self._placement_numbers = itertools.count(1)
        self._avoided: list[tuple[float, int]] = []  # until when, and the key

    @property
    def avoids_some(self) -> bool:
        """Whether workers that have failed are left out for a while, and nobody will say when that is over."""
        return bool(self._avoided)

    def shelves(self) -> list[Shelf]:
        """Return all workers, the first that came first."""
        return list(self._shelves.values())

    def shelf(self, placement: Placement) -> Shelf | None:
        """Return the worker of `placement`, if it is here still."""
        return self._shelves.get(placement.shelf)

    def add(
        self,
        worker: DecodeWorker | WorkerEntry,
        *,
        capacity: dict[str, int],
        block_tokens: dict[str, int | None],
        free: Mapping[str, int] | None = None,
        load: int = 0,
    ) -> Shelf:
        """Add a worker."""
        shelf = Shelf(
            key=next(self._keys),
            number=heapq.heappop(self._spare_numbers) if self._spare_numbers else next(self._numbers),
            name=worker.name,
            worker=worker,
            capacity=capacity,
            block_tokens=block_tokens,
            told_free=dict(capacity if free is None else free),
            told_load=load,
        )
        self._shelves[shelf.key] = self._by_number[shelf.number] = shelf
        self._stand(shelf)
        return shelf

    def tell(self, shelf: Shelf, *, free: Mapping[str, int], load: int) -> None:
        """Note what the worker says of itself."""
        shelf.told_free = dict(free)
        shelf.told_load = load
        shelf.told_at = time.monotonic()
        if shelf.key in self._shelves:
            self._stand(shelf)

    def remove(self, shelf: Shelf) -> None:
        """Take a worker out. What is promised there is void."""
        if self._shelves.pop(shelf.key, None) is not None:
            del self._by_number[shelf.number]
            self._standings.remove(shelf.number)
            heapq.heappush(self._spare_numbers, shelf.number)
            self._policy.removed(shelf.number)

    def to_be_asked(self, most: int, *, before: float) -> list[Shelf]:
        """Return those of the directory who have said nothing since `before`, at most so many, the oldest first."""
        silent = [
            shelf
            for shelf in self._shelves.values()
            if shelf.told_at < before and not shelf.is_asked and isinstance(shelf.worker, WorkerEntry)
        ]
        return heapq.nsmallest(most, silent, key=lambda shelf: shelf.told_at)

    def avoid(self, shelf: Shelf) -> None:
        """Leave a worker out for a while, since it could not be reached: longer each time."""
        shelf.avoided_until = time.monotonic() + min(_AVOIDED_S * 2**shelf.failures, _LONGEST_AVOIDED_S)
        shelf.failures = min(shelf.failures + 1, _MOST_FAILURES)
        if shelf.key in self._shelves:
            self._standings.remove(shelf.number)
            heapq.heappush(self._avoided, (shelf.avoided_until, shelf.key))

    def place(
        self,
        num_tokens: int,
        prefix_hashes: Sequence[Hashable] = (),
        *,
        priority: int = 0,
        without: Collection[Shelf] = (),
    ) -> Placement | None:
        """Promise room on the best worker that has some, other than those in `without`, if there is one."""
        if self._avoided:
            self._try_again()
        chosen = self._choose(num_tokens, prefix_hashes, without)
        if chosen is None:
            return None
        shelf = self._by_number[chosen]
        placement = Placement(
            number=next(self._placement_numbers),
            worker=shelf.name,
            num_tokens=num_tokens,
            blocks=shelf.needed(num_tokens),
            shelf=shelf.key,
            prefix_hashes=prefix_hashes,
            priority=priority,
        )
        for group, count in placement.blocks.items():
            shelf.promised[group] += count
        shelf.placements[placement.number] = placement
        self._stand(shelf)
        self._policy.placed(chosen, prefix_hashes)
        return placement

    def holds(self, placement: Placement) -> bool:
        """Return whether its room is still promised."""
        shelf = self._shelves.get(placement.shelf)
        return shelf is not None and placement.number in shelf.placements

    def release(self, placement: Placement) -> bool:
        """Take a promise back; return whether there was one."""
        shelf = self._shelves.get(placement.shelf)
        if shelf is None or shelf.placements.pop(placement.number, None) is None:
            return False
        for group, count in placement.blocks.items():
            shelf.promised[group] -= count
        self._stand(shelf)
        return True

    def could_have_room(self, num_tokens: int) -> bool:
        """Return whether any worker has room for so many tokens while it is empty."""
        return any(shelf.could_have_room(num_tokens) for shelf in self._shelves.values())

    def _choose(self, num_tokens: int, prefix_hashes: Sequence[Hashable], without: Collection[Shelf]) -> int | None:
        if prefix_hashes:
            for number in self._policy.preferred(prefix_hashes):
                shelf = self._by_number.get(number)
                if shelf is None or shelf in without or (shelf.failures and shelf.avoided_until > time.monotonic()):
                    continue
                if shelf.has_room(num_tokens):
                    return number
        if not without:
            return self._standings.best(num_tokens)
        # Of those that have gone the numbers may be other workers' by now.
        present = frozenset(shelf.number for shelf in without if shelf.key in self._shelves)
        return self._standings.best(num_tokens, without=present)

    def _try_again(self) -> None:
        now = time.monotonic()
        while self._avoided and self._avoided[0][0] <= now:
            shelf = self._shelves.get(heapq.heappop(self._avoided)[1])
            if shelf is not None:
                self._stand(shelf)

    def _stand(self, shelf: Shelf) -> None:
        if shelf.failures and shelf.avoided_until > time.monotonic():
            return
        state = shelf.state()
        self._standings.put(shelf.number, state.room_tokens, self._policy.rank(state))
