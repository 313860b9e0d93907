"""Connecting the sources of one ticket together, since none can tell what it delivers before all are known."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvlink.errors import Closed, DeadlineExceeded, KvlinkError, PeerLost, PeerUnreachable
from kvlink.handoff import handshake
from kvlink.handoff.connect import Connector, Meeting
from kvlink.handoff.deadline import Deadline
from kvlink.handoff.pairing import Share, Shares
from kvlink.handoff.ticket import TicketSource
from kvlink.transport import LaneChoice

__all__ = ["Gathering", "GatheringOwner", "Contact"]

_log = logging.getLogger("kvlink")

# Connections of one ticket that are made at once: a handshake waits for its peer more than it works.
_MOST_AT_ONCE = 16
_LOOK_AGAIN_S = 0.1
_NAMES_TOLD = 4


@dataclass(slots=True, kw_only=True, eq=False)
class Contact:
    """One source as the native core knows it: a number on which pulls may be queued at once.

    Attributes
    ----------
    peer
        Its number in the native core.
    source
        Who it is, from the ticket.
    gathering
        Who connects it; ``None`` once that has ended, well or not.
    error
        Why it could not be connected.
    key
        Where the dialer keeps it: epoch and digest of its share; ``None`` while that is not known.
    """

    peer: int
    source: TicketSource
    gathering: Gathering | None = field(default=None, repr=False)
    error: KvlinkError | None = None
    key: tuple[bytes, bytes] | None = None

    @property
    def title(self) -> str:
        """For messages: name and address."""
        return f"{self.source.name} ({self.source.address})"


class GatheringOwner(Protocol):
    """Who hears what comes of a gathering, on its threads."""

    def on_elected(self, gathering: Gathering, shares: Sequence[Share]) -> None:
        """Hear what each of its contacts delivers."""

    def on_choice(self, contact: Contact, choice: LaneChoice) -> None:
        """Hear how its bytes should come, before they can."""

    def on_connected(self, contact: Contact, choice: LaneChoice) -> None:
        """Hear that the native core has the connection."""

    def on_failed(self, contact: Contact, error: KvlinkError, message: str) -> None:
        """Hear that there will be no connection."""

    def on_end(self, gathering: Gathering) -> None:
        """Hear that every contact is connected or has failed."""


class Gathering:
    """Connects some sources under one deadline, on threads of its own. ``start`` begins it.

    Parameters
    ----------
    contacts
        Whom to connect: all sources of a ticket, or those of them that are not connected.
    shares
        What each of them delivers; ``None`` when that has to be found out.
    """

    def __init__(
        self,
        contacts: Sequence[Contact],
        shares: Sequence[Share] | None,
        *,
        connector: Connector,
        book: Shares,
        deadline: Deadline,
        owner: GatheringOwner,
    ) -> None:
        self.contacts = list(contacts)
        self.epochs = tuple(contact.source.epoch_bytes for contact in contacts)
        self.deadline = deadline
        self._shares = None if shares is None else list(shares)
        self._connector = connector
        self._book = book
        self._owner = owner
        # Re-entrant: the garbage collector may close a forgotten node, which calls this off, anywhere.
        self._lock = threading.RLock()
        self._unfinished = set(self.contacts)
        self._packed: dict[Contact, bytes] = {}
        self._meetings: dict[Contact, Meeting] = {}
        self._failed: tuple[Contact, KvlinkError] | None = None  # the first that failed before the election
        self._reason: KvlinkError | None = None  # of calling it off
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="kvlink-connect", daemon=True)

    @property
    def unfinished(self) -> int:
        """Contacts that are neither connected nor failed."""
        with self._lock:
            return len(self._unfinished)

    def start(self) -> None:
        """Begin. Raises ``RuntimeError`` at the operating system's limit on threads."""
        self._thread.start()

    def call_off(self, reason: KvlinkError) -> None:
        """End it soon: what is not connected fails for `reason`. Any thread may call it."""
        with self._lock:
            self._reason = self._reason or reason
        self.deadline.call_off()

    def join(self, *, timeout_s: float) -> None:
        """Wait for its end. A thread that waits for the name service is left to end by itself."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=timeout_s)

    def _run(self) -> None:
        """Top of the connecting thread: whatever happens, the waiting pulls are told."""
        try:
            shares = self._elected() if self._shares is None else self._shares
            share_of = dict(zip(self.contacts, shares, strict=True))
            self._each(lambda contact: self._join(contact, share_of[contact]))
            for contact in self.contacts:  # Only those whose threads came too late are left.
                self._fail(contact, DeadlineExceeded("the deadline passed"), where=contact.title)
        except KvlinkError as error:
            self._fail_all(error)
        except Exception as error:  # noqa: BLE001 - the top of a thread: pulls must not wait in vain
            _log.exception("connecting to %s failed inside kvlink", self._titles())
            self._fail_all(PeerUnreachable(f"{type(error).__name__}: {error}"))
        finally:
            with self._lock:
                self._ended = True
                left, self._meetings = list(self._meetings.values()), {}
            for meeting in left:
                meeting.link.close()
            self._owner.on_end(self)

    def _elected(self) -> list[Share]:
        """Meet every source whose layout is not known yet, then elect who delivers what."""
        self._each(self._meet)
        with self._lock:
            packed = [self._packed[contact] for contact in self.contacts if contact in self._packed]
        if self._failed is not None:
            raise self._failed[1]
        if len(packed) != len(self.contacts):
            raise DeadlineExceeded("the deadline passed")
        try:
            shares = self._book.elect(self.epochs, packed)
        except KvlinkError as error:
            for meeting in self._meetings.values():
                handshake.refuse(meeting.link, error)
            raise
        self._owner.on_elected(self, shares)
        return shares

    def _meet(self, contact: Contact) -> None:
        if self._failed is not None:
            return
        epoch = contact.source.epoch_bytes
        packed = self._book.layout_of(epoch)
        try:
            if packed is None:
                meeting = self._connector.meet(contact.source, self.deadline)
                packed = meeting.source.layout
                self._book.learn(epoch, packed)
                self._keep(contact, meeting)
        except KvlinkError as error:
            with self._lock:
                self._failed = self._failed or (contact, error)
            self.deadline.call_off()  # Without this source nothing can be elected: the others need not be met.
            return
        with self._lock:
            self._packed[contact] = packed

    def _keep(self, contact: Contact, meeting: Meeting) -> None:
        with self._lock:
            if not self._ended:
                self._meetings[contact] = meeting
                return
        meeting.link.close()
        raise Closed("connecting has ended")

    def _join(self, contact: Contact, share: Share) -> None:
        with self._lock:
            meeting = self._meetings.pop(contact, None)
        try:
            choice = self._connector.join(
                contact.source,
                share,
                peer=contact.peer,
                deadline=self.deadline,
                announce=lambda choice: self._owner.on_choice(contact, choice),
                meeting=meeting,
            )
        except KvlinkError as error:
            self._fail(contact, error, where=contact.title)
            return
        with self._lock:
            in_time = contact in self._unfinished
            self._unfinished.discard(contact)
        if in_time:
            self._owner.on_connected(contact, choice)

    def _each(self, step: Callable[[Contact], None]) -> None:
        """Take `step` for every contact, some at once; return when all are done, or the deadline has passed."""
        waiting = deque(self.contacts)

        def work() -> None:
            while True:
                try:
                    contact = waiting.popleft()
                except IndexError:
                    return
                self._guarded(step, contact)

        helpers = []
        # This thread takes part in none of several: one that waits for a name service must not hold up the report.
        for _ in range(min(len(self.contacts), _MOST_AT_ONCE) if len(self.contacts) > 1 else 0):
            helper = threading.Thread(target=work, name="kvlink-connect", daemon=True)
            try:
                helper.start()
            except RuntimeError:
                break  # The operating system's limit on threads: those that there are do it all.
            helpers.append(helper)
        if not helpers:
            work()
        for helper in helpers:
            while helper.is_alive() and self.deadline.remaining_s > -_LOOK_AGAIN_S:
                helper.join(timeout=_LOOK_AGAIN_S)

    def _guarded(self, step: Callable[[Contact], None], contact: Contact) -> None:
        try:
            step(contact)
        except Exception as error:  # noqa: BLE001 - the top of a thread, as far as this contact goes
            _log.exception("connecting to %s failed inside kvlink", contact.title)
            failure = PeerUnreachable(f"{type(error).__name__}: {error}")
            with self._lock:
                self._failed = self._failed or (contact, failure)
            self._fail(contact, failure, where=contact.title)

    def _fail_all(self, error: KvlinkError) -> None:
        """Fail all contacts: first the one to blame, if there is one, since a pull names its first failure."""
        culprit, where = None, self._titles()
        if self._failed is not None:
            culprit, error = self._failed
            where = culprit.title
        for contact in sorted(self.contacts, key=lambda contact: contact is not culprit):
            self._fail(contact, error, where=where)

    def _fail(self, contact: Contact, error: KvlinkError, *, where: str) -> None:
        with self._lock:
            if contact not in self._unfinished:
                return
            self._unfinished.discard(contact)
            error = self._reason or error
        if isinstance(error, DeadlineExceeded):
            error = PeerUnreachable("it did not answer in time; is the process alive and the network open?")
        elif isinstance(error, PeerLost) and error is not self._reason:
            error = PeerUnreachable(f"{error} during the handshake")
        self._owner.on_failed(contact, error, f"connect to {where}: {error}")

    def _titles(self) -> str:
        titles = [contact.title for contact in self.contacts]
        rest = f" and {len(titles) - _NAMES_TOLD} more" if len(titles) > _NAMES_TOLD else ""
        return ", ".join(titles[:_NAMES_TOLD]) + rest
