"""Meeting under a key, where no router carries the ticket: one node announces it, the other expects it.

Either may come first. A ticket that nobody has expected yet waits for as long as its reservation
lasts; the table that it waits in is bounded.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from kvlink.errors import (
    AlreadyClaimed,
    Busy,
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    KvlinkError,
    OutOfMemory,
    ProtocolError,
    TransportFailed,
)
from kvlink.handoff.answer import Question
from kvlink.handoff.ask import Asker
from kvlink.handoff.reservation import parse_reservation

if TYPE_CHECKING:
    from kvlink.handoff.node import Node

__all__ = ["ANNOUNCE", "Announcement", "Expectation", "Rendezvous", "tell"]

ANNOUNCE = "announce"
"""The question: keep this ticket under this key. The answer is empty."""

_MOST_KEYS = 4096
_SLICE_S = 0.2  # as of a handle's wait: Ctrl-C is answered in between

_L = TypeVar("_L", bound="_Later")


class _Announced(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    ticket: dict[str, Any]


class _Later:
    """What comes within a deadline or not at all. Thread-safe; keeps its node alive."""

    def __init__(self, node: Node, *, title: str, lasts_s: float, ring: Callable[[], None]) -> None:
        self._node = node
        self._title = title
        self._ends_at = time.monotonic() + lasts_s
        self._ring = ring
        self._changed = threading.Condition(threading.RLock())
        self._is_over = False
        self._error: KvlinkError | None = None
        self._value: Any = None

    def __repr__(self) -> str:
        """Name it, and how it stands."""
        state = "waiting" if not self._is_over else "failed" if self._error else "succeeded"
        return f"<{self._title}: {state}>"

    @property
    def error(self) -> KvlinkError | None:
        """Why it failed; ``None`` while it has not."""
        self._look()
        return self._error

    def settle(self, value: Any = None, error: KvlinkError | None = None) -> bool:
        """End it; return whether this call was the first to."""
        with self._changed:
            if self._is_over:
                return False
            self._value, self._error, self._is_over = value, error, True
            self._changed.notify_all()
        self._ring()
        return True

    def poll(self) -> bool:
        """Return whether it has come. Never blocks. Raises what it has failed with."""
        self._look()
        if self._error is not None:
            raise self._error
        return self._is_over

    def wait(self: _L, *, timeout_s: float | None = None) -> _L:
        """Block until it has come, and return this object.

        Raises
        ------
        KvlinkError
            What it has failed with; ``DeadlineExceeded`` also if `timeout_s` passed, and then it goes on.
        """
        until = self._ends_at if timeout_s is None else time.monotonic() + timeout_s
        while not self.poll():
            remaining_s = until - time.monotonic()
            if remaining_s <= 0:
                raise DeadlineExceeded(f"{self._title}: nothing within the timeout, it goes on")
            with self._changed:
                if not self._is_over:
                    self._changed.wait(timeout=min(remaining_s, max(0.0, self._ends_at - time.monotonic()), _SLICE_S))
        return self

    def __await__(self: _L) -> Generator[Any, None, _L]:
        """Wait for it in an asyncio loop, as ``wait`` does."""
        return self._until_over().__await__()

    async def _until_over(self: _L) -> _L:
        import asyncio  # here, since it takes 30 ms and most processes with a node never await

        over = self._node.until_event(lambda: self._is_over)
        try:
            await asyncio.wait_for(over, timeout=max(0.0, self._ends_at - time.monotonic()))
        except asyncio.TimeoutError:
            self._look()
        self.poll()
        return self

    def _look(self) -> None:
        """Notice that the time is over, which rings no bell."""
        if not self._is_over and time.monotonic() >= self._ends_at:
            self.settle(error=DeadlineExceeded(f"{self._title}: nothing came within the deadline"))


class Announcement(_Later):
    """A ticket on its way to another node, which keeps it under a key. Success means that it has it."""


class Expectation(_Later):
    """A ticket that another node will announce under a key."""

    def __init__(self, node: Node, *, title: str, lasts_s: float, ring: Callable[[], None], book: Rendezvous) -> None:
        super().__init__(node, title=title, lasts_s=lasts_s, ring=ring)
        self._book = book

    @property
    def ticket(self) -> dict[str, Any]:
        """What was announced: for ``Node.push``. A fresh copy. Raises as ``wait`` does, without waiting."""
        if not self.poll():
            raise InvalidArgument(f"ticket of {self._title}: it has not come yet, wait for it first")
        return {**self._value, "target": dict(self._value["target"]), "groups": list(self._value["groups"])}

    def cancel(self) -> None:
        """Expect it no longer. Idempotent."""
        self._book.cancel(self, Cancelled(f"{self._title}: cancelled by its owner"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    ticket: dict[str, Any]
    until: float


class Rendezvous:
    """The tickets that were announced to one node, and those that it expects. Thread-safe."""

    def __init__(self, *, name: str) -> None:
        self._name = name
        self._lock = threading.RLock()
        self._announced: dict[str, _Waiting] = {}
        # One that its owner has let go of is expected no longer; and no table keeps a forgotten node alive.
        self._expected: weakref.WeakValueDictionary[str, Expectation] = weakref.WeakValueDictionary()
        self._closed: KvlinkError | None = None

    def answer(self, question: Question) -> bytes:
        """Keep what a peer announces.

        Raises
        ------
        TicketInvalid
            If it is not the ticket of a reservation.
        AlreadyClaimed
            If another ticket waits under its key.
        Busy
            If too many tickets wait.
        """
        try:
            told = msgspec.msgpack.decode(question.body, type=_Announced)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ProtocolError(f"not an announcement: {error}") from None
        parsed = parse_reservation(told.ticket)
        now = time.monotonic()
        with self._lock:
            self._forget_late(now)
            expectation = self._expected.pop(told.key, None)
            if expectation is None:
                self._keep(told, until=now + parsed.ttl_ms / 1000)
                return b""
        if not expectation.settle(told.ticket):  # It ended in this moment.
            with self._lock:
                self._keep(told, until=now + parsed.ttl_ms / 1000)
        return b""

    def expect(self, key: str, expectation: Expectation) -> None:
        """Settle `expectation` with the ticket under `key`, now or once it comes.

        Raises
        ------
        InvalidArgument
            If the key is expected already.
        Busy
            If too many keys are.
        """
        with self._lock:
            if self._closed is not None:
                raise type(self._closed)(str(self._closed))
            self._forget_late(time.monotonic())
            announced = self._announced.pop(key, None)
            if announced is None:
                if key in self._expected:
                    raise InvalidArgument(f"expect at {self._name}: the key {key!r} is expected already")
                if len(self._expected) >= _MOST_KEYS:
                    raise Busy(f"expect at {self._name}: {_MOST_KEYS} keys are expected already; try again")
                self._expected[key] = expectation
                return
        expectation.settle(announced.ticket)

    def cancel(self, expectation: Expectation, why: KvlinkError) -> None:
        """Expect it no longer."""
        with self._lock:
            for key, one in list(self._expected.items()):
                if one is expectation:
                    del self._expected[key]
        expectation.settle(error=why)

    def close(self, why: KvlinkError) -> None:
        """Fail what is expected, and forget what was announced. Idempotent."""
        with self._lock:
            self._closed = self._closed or why
            expected = list(self._expected.values())
            self._expected.clear()
            self._announced = {}
        for one in expected:
            one.settle(error=why)

    def _keep(self, told: _Announced, *, until: float) -> None:
        if self._closed is not None:
            raise type(self._closed)(str(self._closed))
        waiting = self._announced.get(told.key)
        if waiting is not None and waiting.ticket != told.ticket:
            raise AlreadyClaimed(f"{self._name} has another ticket under the key {told.key!r}, which nobody took yet")
        if waiting is None and len(self._announced) >= _MOST_KEYS:
            raise Busy(f"{self._name} has {_MOST_KEYS} announced tickets that nobody took yet; try again")
        self._announced[told.key] = _Waiting(ticket=told.ticket, until=until)

    def _forget_late(self, now: float) -> None:
        self._announced = {key: one for key, one in self._announced.items() if one.until > now}
        for key, one in list(self._expected.items()):
            if one.error is not None:
                del self._expected[key]


def tell(
    announcement: Announcement, asker: Asker, address: str, *, key: str, ticket: Mapping[str, Any], deadline_s: float
) -> None:
    """Begin to tell the node at `address`. Does not wait. Raises ``OutOfMemory`` if there is no thread to do it on."""
    body = msgspec.msgpack.encode(_Announced(key=key, ticket=dict(ticket)))

    def run() -> None:
        error: KvlinkError | None = None
        try:
            asker.ask(address, ANNOUNCE, body, deadline_s=deadline_s)
        except KvlinkError as failure:
            error = failure
        except Exception as failure:  # noqa: BLE001 - the top of a thread
            error = TransportFailed(f"{type(failure).__name__}: {failure}")
        announcement.settle(error=error)

    try:
        threading.Thread(target=run, name="kvlink-announce", daemon=True).start()
    except RuntimeError as error:
        raise OutOfMemory(f"announce: {error}") from None
