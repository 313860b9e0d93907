"""Finding the connections to the sources that tickets name, and having the missing ones made."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import suppress

from kvlink.config import Limits
from kvlink.errors import Busy, Closed, KvlinkError, NotReady, OutOfMemory, PeerLost
from kvlink.handoff.connect import Connector
from kvlink.handoff.deadline import Deadline
from kvlink.handoff.gather import Contact, Gathering
from kvlink.handoff.native import NativeEngine
from kvlink.handoff.pairing import Share, Shares
from kvlink.handoff.ticket import TicketSource
from kvlink.transport import LaneChoice

__all__ = ["Dialer", "allowed_to_connect"]

_log = logging.getLogger("kvlink")

# The pulls that wait must hear that the peer is unreachable, and not only that their time is over.
_REPORT_MARGIN_S = 0.05
_REPORT_MARGIN_SHARE = 0.1
# Lost peers are looked for once their number may have doubled, so each costs a constant.
_FEW_CONTACTS = 64


def allowed_to_connect(deadline_s: float) -> float:
    """Return how many of a handoff's seconds connecting may take."""
    return deadline_s - min(_REPORT_MARGIN_S, deadline_s * _REPORT_MARGIN_SHARE)


class Dialer:
    """Knows a contact for each source and share. Thread-safe.

    A connection is for one source in one life and one share of this node's cache, since the source
    compiles the template for that share. A ticket whose shares are not known yet gets contacts of
    its own, and they are known by their shares afterwards.
    """

    def __init__(
        self, engine: NativeEngine, *, name: str, connector: Connector, shares: Shares, limits: Limits
    ) -> None:
        self._engine = engine
        self._name = name
        self._connector = connector
        self._shares = shares
        self._limits = limits
        self._lock = threading.RLock()
        self._contacts: dict[tuple[bytes, bytes], Contact] = {}  # the latest of each source and share
        self._look_for_lost_at = _FEW_CONTACTS
        self._gatherings: set[Gathering] = set()
        self._electing: dict[tuple[bytes, ...], Gathering] = {}  # by all of its sources
        self._lane_reasons: dict[int, str] = {}  # by the peer's number
        self._closed: KvlinkError | None = None  # why nothing is dialed any more

    def contacts_for(self, sources: Sequence[TicketSource], *, deadline_s: float) -> list[Contact]:
        """Return the contact of each source, dialing those that are not connected. Does not wait.

        Raises
        ------
        Busy
            If too many peers are being dialed.
        Closed, NotReady
            If the node is closed, or suspended.
        OutOfMemory
            If there is no thread to dial on.
        """
        allowed_s = allowed_to_connect(deadline_s)
        epochs = tuple(source.epoch_bytes for source in sources)
        with self._lock:
            if self._closed is not None:
                raise type(self._closed)(f"pull: {self._closed}")
            electing = self._electing.get(epochs)
            if electing is not None:
                electing.deadline.extend(allowed_s)
                return electing.contacts
            shares = self._shares.known(epochs)
            if shares is None:
                self._check_busy(sources)
                contacts = [self._expect(source) for source in sources]
                self._gather(contacts, None, allowed_s)
                return contacts
            return self._connected(sources, shares, allowed_s)

    def drop(self, name: str) -> None:
        """Call off the dialing of every peer called `name`, and of those that wait for it."""
        reason = PeerLost(f"{self._name} dropped the peer {name}")
        with self._lock:
            for gathering in self._gatherings:
                if any(contact.source.name == name for contact in gathering.contacts):
                    gathering.call_off(reason)

    def close(self, *, deadline_s: float, why: KvlinkError) -> None:
        """Call off all dialing for `why` and wait for the threads. Idempotent."""
        with self._lock:
            self._closed = self._closed or why
            gatherings = list(self._gatherings)
        for gathering in gatherings:
            gathering.call_off(why)
        deadline = Deadline(deadline_s)
        for gathering in gatherings:
            gathering.join(timeout_s=max(0.0, deadline.remaining_s))

    def lane_reasons(self) -> dict[int, str]:
        """Return why each connected source is read as it is, by its number in the native core."""
        with self._lock:
            return dict(self._lane_reasons)

    def on_elected(self, gathering: Gathering, shares: Sequence[Share]) -> None:
        """Remember the contacts by their shares."""
        with self._lock:
            for contact, share in zip(gathering.contacts, shares, strict=True):
                self._put(contact, share)
            if self._electing.get(gathering.epochs) is gathering:
                del self._electing[gathering.epochs]

    def on_choice(self, contact: Contact, choice: LaneChoice) -> None:
        """Remember how its bytes come."""
        with self._lock:
            self._lane_reasons[contact.peer] = choice.reason

    def on_connected(self, contact: Contact, choice: LaneChoice) -> None:
        """Tell the operator how its bytes come."""
        with self._lock:
            self._lane_reasons[contact.peer] = choice.reason
            contact.gathering = None
        _log.info("%s reads from %s: %s", self._name, contact.title, choice.reason)

    def on_failed(self, contact: Contact, error: KvlinkError, message: str) -> None:
        """Tell the pulls that wait for it; the next one dials anew."""
        contact.error = error
        with self._lock:
            if contact.gathering is not None and self._electing.get(contact.gathering.epochs) is contact.gathering:
                del self._electing[contact.gathering.epochs]
            contact.gathering = None
            self._forget(contact)
        _log.debug("%s", message)
        with suppress(Closed, NotReady):  # Closing has failed the waiting pulls already.
            self._engine.fail_peer(contact.peer, code=type(error).__name__, message=message)

    def on_end(self, gathering: Gathering) -> None:
        """Forget a gathering that is over."""
        with self._lock:
            self._gatherings.discard(gathering)

    def _connected(self, sources: Sequence[TicketSource], shares: Sequence[Share], allowed_s: float) -> list[Contact]:
        contacts: list[Contact] = []
        missing: list[Contact] = []
        missing_shares: list[Share] = []
        for source, share in zip(sources, shares, strict=True):
            contact = self._contacts.get((source.epoch_bytes, share.digest))
            if contact is not None and not self._engine.is_peer_lost(contact.peer):
                if contact.gathering is not None:
                    contact.gathering.deadline.extend(allowed_s)
                contacts.append(contact)
                continue
            if not missing:
                self._check_busy(sources)
            contact = self._expect(source)
            contacts.append(contact)
            missing.append(contact)
            missing_shares.append(share)
        if missing:
            for contact, share in zip(missing, missing_shares, strict=True):
                self._put(contact, share)
            self._gather(missing, missing_shares, allowed_s)
        return contacts

    def _check_busy(self, sources: Sequence[TicketSource]) -> None:
        dialed = sum(gathering.unfinished for gathering in self._gatherings)
        if dialed >= self._limits.pending_connects:
            raise Busy(
                f"pull from {sources[0].name} ({sources[0].address}): {dialed} peers are being dialed already, "
                "the most that limits.pending_connects allows; try again"
            )

    def _expect(self, source: TicketSource) -> Contact:
        return Contact(peer=self._engine.expect_peer(address=source.address), source=source)

    def _gather(self, contacts: Sequence[Contact], shares: Sequence[Share] | None, allowed_s: float) -> None:
        deadline = Deadline(allowed_s, most_s=self._limits.connect_timeout_s)
        gathering = Gathering(
            contacts, shares, connector=self._connector, book=self._shares, deadline=deadline, owner=self
        )
        for contact in contacts:
            contact.gathering = gathering
        # Its threads cannot miss these: they take the lock before they tell anything.
        self._gatherings.add(gathering)
        if shares is None:
            self._electing[gathering.epochs] = gathering
        try:
            gathering.start()
        except RuntimeError as error:  # the operating system's limit on threads
            self._gatherings.discard(gathering)
            failure = OutOfMemory(f"{error}")
            for contact in contacts:
                self.on_failed(contact, failure, f"connect to {contact.title}: {failure}")
            raise failure from None

    def _put(self, contact: Contact, share: Share) -> None:
        contact.key = (contact.source.epoch_bytes, share.digest)
        self._contacts[contact.key] = contact
        if len(self._contacts) >= self._look_for_lost_at:
            is_lost = self._engine.is_peer_lost
            self._contacts = {key: one for key, one in self._contacts.items() if not is_lost(one.peer)}
            self._lane_reasons = {peer: text for peer, text in self._lane_reasons.items() if not is_lost(peer)}
            self._look_for_lost_at = max(_FEW_CONTACTS, 2 * len(self._contacts))

    def _forget(self, contact: Contact) -> None:
        self._lane_reasons.pop(contact.peer, None)
        if contact.key is not None and self._contacts.get(contact.key) is contact:
            del self._contacts[contact.key]
