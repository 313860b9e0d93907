"""The best worker that has room, without looking at all of them."""

from __future__ import annotations

from typing import Any

__all__ = ["Rank", "Standings"]

Rank = tuple[Any, ...]
"""Order of preference, the lowest first."""

_NO_ROOM = -1
_LAST: Rank = (float("inf"), -1)
# Children of a node: wide enough that Python's own `min` and `max` do most of the work.
_SHIFT = 3
_WIDTH = 1 << _SHIFT


class Standings:
    """A tournament over numbered entries, each with room and a rank. Not thread-safe.

    A node of the tree knows the most room and the best rank below it, so that a search leaves out
    every branch in which nobody has room, or nobody is better than who was found. Changing an entry
    costs the height of the tree. A search costs next to nothing if the best of all has room, and
    otherwise a few times the height, unless many of the best are full.
    """

    def __init__(self) -> None:
        # By level, from the entries to the root; each level is padded to whole nodes. A rank has the entry's number
        # behind it, so that no two are the same.
        self._rooms: list[list[int]] = [[_NO_ROOM] * _WIDTH, [_NO_ROOM]]
        self._ranks: list[list[Rank]] = [[_LAST] * _WIDTH, [_LAST]]

    def put(self, number: int, room: int, rank: Rank) -> None:
        """Say how entry `number`, a small number, stands now. One with room below 0 is found by nobody."""
        while number >= len(self._rooms[0]):
            self._grow()
        rooms, ranks = self._rooms[0], self._ranks[0]
        rooms[number], ranks[number] = room, (*rank, number)
        for above_rooms, above_ranks in zip(self._rooms[1:], self._ranks[1:], strict=True):
            number >>= _SHIFT
            first = number << _SHIFT
            most, best = max(rooms[first : first + _WIDTH]), min(ranks[first : first + _WIDTH])
            if above_rooms[number] == most and above_ranks[number] is best:
                return
            above_rooms[number], above_ranks[number] = most, best
            rooms, ranks = above_rooms, above_ranks

    def remove(self, number: int) -> None:
        """Take an entry out."""
        if number < len(self._rooms[0]):
            self.put(number, _NO_ROOM, _LAST)

    def has_room(self, needed: int) -> bool:
        """Return whether anybody has room for `needed`."""
        return self._rooms[-1][0] >= needed

    def best(self, needed: int, *, without: frozenset[int] = frozenset()) -> int | None:
        """Return the number of the best entry with room for `needed`, other than those in `without`."""
        if not self.has_room(needed):
            return None
        rooms, ranks = self._rooms, self._ranks
        number: int = ranks[-1][0][-1]
        if number >= 0 and rooms[0][number] >= needed and number not in without:
            return number
        best = _LAST
        open_nodes = [(len(rooms) - 1, 0)]
        while open_nodes:
            level, at = open_nodes.pop()
            if rooms[level][at] < needed or ranks[level][at] >= best:
                continue
            leader = ranks[level][at]
            if rooms[0][leader[-1]] >= needed and leader[-1] not in without:
                best = leader
            elif level:
                below = level - 1
                first = at << _SHIFT
                children = [each for each in range(first, first + _WIDTH) if rooms[below][each] >= needed]
                # The best comes off first, so that it may rule the others out.
                children.sort(key=ranks[below].__getitem__, reverse=True)
                open_nodes += [(below, each) for each in children]
        return best[-1] if best is not _LAST else None

    def _grow(self) -> None:
        """Make each level as long again times the width, and add a root."""
        for rooms, ranks in zip(self._rooms, self._ranks, strict=True):
            missing = len(rooms) * (_WIDTH - 1)
            rooms += [_NO_ROOM] * missing
            ranks += [_LAST] * missing
        self._rooms.append([max(self._rooms[-1])])
        self._ranks.append([min(self._ranks[-1])])
