"""The best worker that has room, without looking at all of them."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any

__all__ = ["Rank", "Standings"]

Rank = tuple[Any, ...]
"""Order of preference, the lowest first."""

# How far one looks among the best before it asks who has room at all.
_LOOKED_AT = 32


class Standings:
    """Numbered entries, each with room and a rank, sorted by both. Not thread-safe.

    Changing an entry takes as many comparisons as the logarithm of their number, and moves 8 bytes an
    entry in memory, which a thousand do not notice. A search takes the first by rank that has room;
    where many of those are full, it looks through the few that are not.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[int, Rank]] = {}
        # The number comes last, so that no two are the same.
        self._by_rank: list[Rank] = []
        self._by_room: list[tuple[int, int]] = []

    def put(self, number: int, room: int, rank: Rank) -> None:
        """Say how entry `number` stands now."""
        self.remove(number)
        ranked = (*rank, number)
        self._entries[number] = room, ranked
        insort(self._by_rank, ranked)
        insort(self._by_room, (room, number))

    def remove(self, number: int) -> None:
        """Take an entry out. Idempotent."""
        entry = self._entries.pop(number, None)
        if entry is not None:
            room, ranked = entry
            del self._by_rank[bisect_left(self._by_rank, ranked)]
            del self._by_room[bisect_left(self._by_room, (room, number))]

    def best(self, needed: int, *, without: frozenset[int] = frozenset()) -> int | None:
        """Return the number of the best entry with room for `needed`, other than those in `without`."""
        if not self._by_room or self._by_room[-1][0] < needed:
            return None
        entries = self._entries
        for looked_at, ranked in enumerate(self._by_rank):
            number: int = ranked[-1]
            if entries[number][0] >= needed and number not in without:
                return number
            if looked_at == _LOOKED_AT:
                first = bisect_left(self._by_room, (needed, -1))
                if len(self._by_room) - first <= len(self._by_rank) // _LOOKED_AT:
                    return self._best_of(first, without)
        return None

    def _best_of(self, first: int, without: frozenset[int]) -> int | None:
        """Return the best of those that have at least as much room as the one at `first`."""
        fitting = [self._entries[number][1] for _, number in self._by_room[first:] if number not in without]
        return min(fitting)[-1] if fitting else None
