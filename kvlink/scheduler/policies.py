"""In which order workers are preferred: pluggable, and never a reason to look at all of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvlink.errors import ConfigError
from kvlink.scheduler.standings import Rank

__all__ = ["LeastLoaded", "MostRoom", "Policy", "PrefixAffinity", "WorkerState"]


@dataclass(slots=True)
class WorkerState:
    """How a worker stands, for policies.

    Attributes
    ----------
    number
        Its own; the one that came first has the lowest.
    room_tokens
        The longest request that fits there now.
    load
        Requests that it has, as far as is known here.
    """

    number: int
    room_tokens: int
    load: int


class Policy(Protocol):
    """Orders workers. Called under the scheduler's lock: it must not wait, nor call the scheduler."""

    def rank(self, worker: WorkerState) -> Rank:
        """Return where it stands among the others, the lowest first. May depend on nothing but `worker`."""

    def preferred(self, prefix_hashes: Sequence[Hashable]) -> Sequence[int]:
        """Return the numbers of the workers to ask before the best of all, a few at most, the best first."""

    def placed(self, number: int, prefix_hashes: Sequence[Hashable]) -> None:
        """Hear that a request with this prefix goes to worker `number`."""

    def removed(self, number: int) -> None:
        """Hear that worker `number` is gone."""


class MostRoom:
    """Whoever has most room for tokens, then who has fewest requests."""

    def rank(self, worker: WorkerState) -> Rank:
        """See ``Policy``."""
        return -worker.room_tokens, worker.load

    def preferred(self, prefix_hashes: Sequence[Hashable]) -> Sequence[int]:
        """See ``Policy``: nobody."""
        return ()

    def placed(self, number: int, prefix_hashes: Sequence[Hashable]) -> None:
        """See ``Policy``."""

    def removed(self, number: int) -> None:
        """See ``Policy``."""


class LeastLoaded(MostRoom):
    """Whoever has fewest requests, then who has most room."""

    def rank(self, worker: WorkerState) -> Rank:
        """See ``Policy``."""
        return worker.load, -worker.room_tokens


class PrefixAffinity:
    """Whoever was sent the longest prefix of the request before, if it has room; otherwise as `base` says.

    Parameters
    ----------
    base
        The order of all others, ``MostRoom`` by default.
    remember
        Hashes of prefixes that are remembered, the latest.

    Raises
    ------
    ConfigError
        If `remember` is less than 1.
    """

    def __init__(self, base: Policy | None = None, *, remember: int = 1 << 16) -> None:
        if remember < 1:
            raise ConfigError(f"prefix affinity: remember is {remember!r}; it must be at least 1")
        self._base = MostRoom() if base is None else base
        self._remember = remember
        self._holder: OrderedDict[Hashable, int] = OrderedDict()  # the latest worker of each, oldest first

    def rank(self, worker: WorkerState) -> Rank:
        """See ``Policy``."""
        return self._base.rank(worker)

    def preferred(self, prefix_hashes: Sequence[Hashable]) -> Sequence[int]:
        """See ``Policy``. A hash stands for all tokens up to it, so the last that is known is the longest prefix."""
        for known in reversed(prefix_hashes):
            holder = self._holder.get(known)
            if holder is not None:
                return (holder,)
        return ()

    def placed(self, number: int, prefix_hashes: Sequence[Hashable]) -> None:
        """See ``Policy``."""
        for each in prefix_hashes:
            self._holder[each] = number
            self._holder.move_to_end(each)
        while len(self._holder) > self._remember:
            self._holder.popitem(last=False)
        self._base.placed(number, prefix_hashes)

    def removed(self, number: int) -> None:
        """See ``Policy``."""
        self._holder = OrderedDict((each, holder) for each, holder in self._holder.items() if holder != number)
        self._base.removed(number)
