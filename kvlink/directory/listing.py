"""What a directory says, whatever keeps it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Protocol

import msgspec

from kvlink.errors import ConfigError

__all__ = ["Directory", "Listing", "Registration", "StaticDirectory", "WorkerEntry", "Watchers"]

_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Epoch = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 50)]
_BlockTokens = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class WorkerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One decode worker in one life. It may come from anywhere, so fields that are not known are skipped.

    Attributes
    ----------
    name
        For people; several may have the same.
    address
        ``host:port`` at which its node listens.
    epoch
        Its life, in hexadecimal: what tells it from every other worker, and from itself before a restart.
    blocks
        Blocks that it has in all, by group.
    free_blocks
        How many of them nobody has.
    block_tokens
        Tokens in one of its blocks, by group; 0 for slots of state, of which a request takes one.
    window_bytes
        Bytes that may be on their way to it at once.
    load
        Requests that it decodes now.
    """

    name: _Text
    address: _Text
    epoch: _Epoch
    blocks: dict[_Text, _Count]
    free_blocks: dict[_Text, _Count]
    block_tokens: dict[_Text, _BlockTokens]
    window_bytes: _Count = 0
    load: _Count = 0

    def __post_init__(self) -> None:
        """Refuse an entry whose groups differ from one field to the next."""
        if not (self.blocks.keys() == self.free_blocks.keys() == self.block_tokens.keys()):
            raise ValueError(f"worker {self.name}: blocks, free_blocks and block_tokens must name the same groups")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What a directory knew at one moment.

    Attributes
    ----------
    workers
        By epoch.
    stale
        Whether the directory cannot be reached, so that this is what it said last.
    """

    workers: Mapping[str, WorkerEntry] = field(default_factory=lambda: MappingProxyType({}))
    stale: bool = False


class Registration(Protocol):
    """A worker's own entry, for as long as this is open."""

    def changed(self) -> None:
        """Say that the entry is another now. Never waits; what follows quickly is written together."""

    def close(self) -> None:
        """Take the entry out. Idempotent; waits a moment at most."""


class Directory(Protocol):
    """Where schedulers find decode workers. Thread-safe; nothing but ``close`` waits."""

    def listing(self) -> Listing:
        """Return what is known now."""

    def watch(self, changed: Callable[[Listing], None]) -> Callable[[], None]:
        """Call `changed` with the present listing and with each new one, until what this returns is called.

        It is called in a thread of the directory, and must not wait.
        """

    def register(self, entry: Callable[[], WorkerEntry]) -> Registration:
        """List what `entry` returns, which is asked again from time to time, in a thread of the directory."""

    def close(self) -> None:
        """Let go of connections and threads; registered entries are taken out. Idempotent."""


class Watchers:
    """Who wants to know of each new listing. Thread-safe; each hears them in their order."""

    def __init__(self, listing: Listing) -> None:
        self._lock = threading.RLock()
        self._watchers: dict[int, Callable[[Listing], None]] = {}
        self._number = 0
        self._listing = listing

    @property
    def listing(self) -> Listing:
        """The latest."""
        return self._listing

    def add(self, changed: Callable[[Listing], None]) -> Callable[[], None]:
        """Tell `changed` the present listing, and later ones; return what ends that."""
        with self._lock:
            self._number += 1
            number = self._number
            self._watchers[number] = changed
            changed(self._listing)
        return lambda: self._drop(number)

    def tell(self, listing: Listing) -> None:
        """Keep `listing` and tell everybody, unless it is what they know."""
        with self._lock:
            if listing == self._listing:
                return
            self._listing = listing
            for changed in list(self._watchers.values()):
                changed(listing)

    def _drop(self, number: int) -> None:
        with self._lock:
            self._watchers.pop(number, None)


class StaticDirectory:
    """A list that the program itself keeps. Thread-safe.

    Raises
    ------
    ConfigError
        If a worker appears twice.
    """

    def __init__(self, workers: Iterable[WorkerEntry] = ()) -> None:
        self._lock = threading.RLock()
        self._watchers = Watchers(Listing())
        self._workers: dict[str, WorkerEntry] = {}
        for entry in workers:
            if entry.epoch in self._workers:
                raise ConfigError(f"directory: the life {entry.epoch} of {entry.name} is listed twice")
            self._workers[entry.epoch] = entry
        self._tell()

    def put(self, entry: WorkerEntry) -> None:
        """Add a worker, or say how it stands now."""
        with self._lock:
            self._workers[entry.epoch] = entry
            self._tell()

    def remove(self, epoch: str) -> None:
        """Take a worker out. Idempotent."""
        with self._lock:
            self._workers.pop(epoch, None)
            self._tell()

    def listing(self) -> Listing:
        """Return what is known now."""
        return self._watchers.listing

    def watch(self, changed: Callable[[Listing], None]) -> Callable[[], None]:
        """Call `changed` with each new listing, in the thread that makes it; see ``Directory.watch``."""
        return self._watchers.add(changed)

    def register(self, entry: Callable[[], WorkerEntry]) -> Registration:
        """List what `entry` returns; it is asked again whenever it has changed."""
        return _StaticRegistration(self, entry)

    def close(self) -> None:
        """Do nothing: there is nothing to let go of."""

    def _tell(self) -> None:
        self._watchers.tell(Listing(workers=MappingProxyType(dict(self._workers))))


class _StaticRegistration:
    """A worker's own entry in a list of the same process."""

    def __init__(self, directory: StaticDirectory, entry: Callable[[], WorkerEntry]) -> None:
        self._directory = directory
        self._entry = entry
        self._epoch = ""
        self._closed = False
        self.changed()

    def changed(self) -> None:
        if self._closed:
            return
        entry = self._entry()
        if self._epoch not in ("", entry.epoch):
            self._directory.remove(self._epoch)
        self._epoch = entry.epoch
        self._directory.put(entry)

    def close(self) -> None:
        self._closed = True
        self._directory.remove(self._epoch)
