"""The book of the workers: what each has, what is promised there, and who is next."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvlink.directory import WorkerEntry
from kvlink.scheduler.policies import Policy, WorkerState
from kvlink.scheduler.standings import Standings

__all__ = ["Book", "DecodeWorker", "Placement", "Shelf"]

_ANY_LENGTH = 1 << 62


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
        if shelf.key in self._shelves:
            self._stand(shelf)

    def remove(self, shelf: Shelf) -> None:
        """Take a worker out. What is promised there is void."""
        if self._shelves.pop(shelf.key, None) is not None:
            del self._by_number[shelf.number]
            self._standings.remove(shelf.number)
            heapq.heappush(self._spare_numbers, shelf.number)
            self._policy.removed(shelf.number)

    def place(
        self,
        num_tokens: int,
        prefix_hashes: Sequence[Hashable] = (),
        *,
        priority: int = 0,
        without: Collection[Shelf] = (),
    ) -> Placement | None:
        """Promise room on the best worker that has some, other than those in `without`, if there is one."""
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
                if shelf is not None and shelf not in without and shelf.has_room(num_tokens):
                    return number
        if not without:
            return self._standings.best(num_tokens)
        # Of those that have gone the numbers may be other workers' by now.
        present = frozenset(shelf.number for shelf in without if shelf.key in self._shelves)
        return self._standings.best(num_tokens, without=present)

    def _stand(self, shelf: Shelf) -> None:
        state = shelf.state()
        self._standings.put(shelf.number, state.room_tokens, self._policy.rank(state))
