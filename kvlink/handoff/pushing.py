"""What a node does to reserve and to push: the part of ``Node`` for handoffs that the source begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from kvlink.config import Limits
from kvlink.errors import InvalidArgument, NotOffered, StalePeer
from kvlink.handoff.address import split_address
from kvlink.handoff.arguments import check_count, check_integrity, check_milliseconds, check_seconds, check_text
from kvlink.handoff.block_tables import Blocks, block_tables
from kvlink.handoff.mint import MOST_TOKENS
from kvlink.handoff.push import Push, Slot
from kvlink.handoff.rendezvous import Announcement, Expectation, tell
from kvlink.handoff.reservation import Reservation, make_reservation, parse_reservation, parse_sources
from kvlink.handoff.ticket import TicketSource

if TYPE_CHECKING:
    from kvlink.handoff.life import Life
    from kvlink.handoff.node import Node
    from kvlink.handoff.running import Running

__all__ = ["PushingNode"]

# The peer answers by the deadline; its answer takes a moment.
_GRACE_S = 1.0


class PushingNode:
    """Reserves blocks for other nodes to push into, and pushes into theirs."""

    _integrity: str
    _limits: Limits

    def reserve(
        self,
        blocks: Blocks,
        *,
        num_tokens: int,
        ttl_s: float = 30.0,
        skip_tokens: int = 0,
        require: str | None = None,
        label: str = "",
        sources: Sequence[Mapping[str, Any]] = (),
    ) -> Slot:
        """Hold `blocks` for one other node to push `num_tokens` tokens into, or for several. Does not block.

        They are held from now on, and written only once somebody pushes. `blocks`, `skip_tokens` and `require` are as
        in ``pull``. The outcome comes within `ttl_s` seconds: bytes that have not come by then are not waited for.

        `sources` are the descriptors of nodes that will push together, such as the ranks of an engine. They are
        connected at once. Each has to push, and delivers what it was elected for, maybe nothing; one that fails, or
        dies before it pushes, fails the reservation. Without `sources` any node may push, and the first is taken:
        as nobody knows who that will be, nobody's death is noticed before it has pushed.

        Raises
        ------
        InvalidArgument
            As in ``pull``, or if a source is no descriptor, or appears twice.
        BlocksBusy, LaneUnavailable, Busy, NotReady, Closed
            As in ``pull``.
        """
        running = self._usable("reserve")
        life = running.life
        num_tokens = check_count(num_tokens, low=0, high=MOST_TOKENS, called="reserve: num_tokens")
        skip_tokens = check_count(skip_tokens, low=0, high=num_tokens, called="reserve: skip_tokens")
        ttl_ms = check_milliseconds(ttl_s, called="reserve: ttl_s")
        label = check_text(label, called="reserve: label", may_be_empty=True)
        lane = self._lane(require, "reserve")
        tables = block_tables(blocks, life.groups, num_tokens=num_tokens, operation="reserve")
        named = parse_sources(sources)
        contacts = life.dialer.contacts_for(named, deadline_s=ttl_ms / 1000) if named else []
        handoff = life.engine.reserve(
            [(contact.peer, contact.source.epoch_bytes) for contact in contacts],
            blocks=tables,
            num_tokens=num_tokens,
            skip_tokens=skip_tokens,
            ttl_ms=ttl_ms,
            lane=lane,
            integrity=self._integrity,
            label=label,
        )
        ticket = make_reservation(
            epoch=life.epoch,
            sequence=handoff.sequence,
            target=TicketSource(name=running.name, address=running.address, epoch=life.epoch.hex()),
            num_tokens=num_tokens,
            skip_tokens=skip_tokens,
            groups=[group.name for group in life.groups],
            ttl_ms=ttl_ms,
            sources=named,
        )
        title = f"reservation {ticket['reservation']} of {running.name}"
        return Slot(handoff, cast("Node", self), title=title, lasts_s=ttl_ms / 1000, ticket=ticket, contacts=contacts)

    def push(
        self,
        ticket: Mapping[str, Any],
        blocks: Blocks,
        *,
        num_tokens: int | None = None,
        deadline_s: float = 30.0,
        integrity: str | None = None,
        label: str = "",
    ) -> Push:
        """Bring blocks of this node into what `ticket` reserves. Does not block.

        `blocks` are those that there are by now, from the first token on; more follow by ``add``. Nothing moves
        before ``ready`` or ``commit`` say so. Requests of fewer than ``limits.push_at_once_tokens`` tokens move
        all at once, at ``commit``. The bytes must stay as they are from when they are said to be ready until the
        push is released, which is when the other node has confirmed them, or after `deadline_s` seconds.

        `num_tokens` is the ticket's. `integrity` is as in ``offer``.

        Raises
        ------
        TicketInvalid
            If the ticket is not that of a reservation, or was altered.
        InvalidArgument
            As in ``offer``, or if `num_tokens` is not what is reserved, or it is reserved for other nodes.
        StalePeer
            If it is reserved for an earlier life of this node.
        NotOffered
            If this cache lacks a group of what is reserved.
        Busy
            If there are as many live handoffs or unconnected peers as the limits allow.
        BlocksBusy, NotReady, Closed
            As in ``offer``.
        """
        running = self._usable("push")
        life = running.life
        parsed = parse_reservation(ticket)
        operation = f"push {parsed.title}"
        _check_fits(parsed, life, running.name, num_tokens, operation)
        deadline_ms = check_milliseconds(deadline_s, called=f"{operation}: deadline_s")
        handoff = life.engine.push(
            parsed.native_id,
            blocks=block_tables(blocks, life.groups, num_tokens=parsed.num_tokens, operation=operation, partial=True),
            num_tokens=parsed.num_tokens,
            deadline_ms=deadline_ms,
            at_once=parsed.num_tokens < self._limits.push_at_once_tokens,
            integrity=check_integrity(integrity, called=f"{operation}: integrity") or self._integrity,
            label=check_text(label, called=f"{operation}: label", may_be_empty=True),
        )
        call = life.caller.start(handoff, parsed.target, sources=parsed.sources, deadline_s=deadline_ms / 1000)
        return Push(
            handoff,
            cast("Node", self),
            title=operation,
            lasts_s=deadline_ms / 1000,
            reservation=parsed,
            groups=life.groups,
            most_payload_bytes=self._limits.payload_bytes,
            call=call,
        )

    def announce(self, ticket: Mapping[str, Any], address: str, *, key: str, deadline_s: float = 5.0) -> Announcement:
        """Bring the ticket of a reservation to the node at `address`, which keeps it under `key`. Does not block.

        That node has it from ``expect``, before or after this; it waits there for as long as the reservation
        lasts. Success means that it has come; it says nothing of whether anybody takes it.

        The announcement fails with ``AlreadyClaimed`` if another ticket waits under the key, with ``Busy`` if too
        many do, and as connecting does.

        Raises
        ------
        TicketInvalid
            If the ticket is not that of a reservation, or was altered.
        InvalidArgument
            If the address is none, or another argument is out of bounds.
        NotReady, Closed
            If the node is suspended or closed, or this is a forked child.
        """
        running = self._usable("announce")
        parse_reservation(ticket)
        key = check_text(key, called="announce: key", may_be_empty=False)
        deadline_s = check_seconds(deadline_s, called="announce: deadline_s")
        try:
            split_address(address)
        except (ValueError, AttributeError) as error:
            raise InvalidArgument(f"announce: {error}") from None
        title = f"announce {ticket['reservation']} at {address} under {key!r}"
        announcement = Announcement(cast("Node", self), title=title, lasts_s=deadline_s + _GRACE_S, ring=running.ring)
        tell(announcement, running.life.asker, address, key=key, ticket=ticket, deadline_s=deadline_s)
        return announcement

    def expect(self, key: str, *, deadline_s: float) -> Expectation:
        """Wait for what another node announces under `key`, or take what it has announced already. Does not block.

        The expectation is waited for, awaited or polled, and has the ticket then. It fails with
        ``DeadlineExceeded`` after `deadline_s` seconds.

        Raises
        ------
        InvalidArgument
            If the key is expected already, or an argument is out of bounds.
        Busy
            If too many keys are expected.
        Closed
            If the node is closed, or this is a forked child.
        """
        running = self._usable("expect")
        key = check_text(key, called="expect: key", may_be_empty=False)
        deadline_s = check_seconds(deadline_s, called="expect: deadline_s")
        expectation = Expectation(
            cast("Node", self),
            title=f"expect {key!r} at {running.name}",
            lasts_s=deadline_s,
            ring=running.ring,
            book=running.rendezvous,
        )
        running.rendezvous.expect(key, expectation)
        return expectation

    if TYPE_CHECKING:  # what the node has

        def _usable(self, operation: str) -> Running: ...

        def _lane(self, require: str | None, operation: str) -> str: ...


def _check_fits(reservation: Reservation, life: Life, name: str, num_tokens: int | None, operation: str) -> None:
    if num_tokens is not None and num_tokens != reservation.num_tokens:
        raise InvalidArgument(f"{operation}: num_tokens is {num_tokens!r}, and {reservation.num_tokens} are reserved")
    own = life.epoch.hex()
    if reservation.sources and own not in {source.epoch for source in reservation.sources}:
        names = [source.name for source in reservation.sources]
        if name in names:
            raise StalePeer(f"{operation}: it is reserved for another life of {name}: reserve again")
        raise InvalidArgument(f"{operation}: it is reserved for pushes by {', '.join(names)}, and this is {name}")
    missing = set(reservation.groups) - {group.name for group in life.groups}
    if missing and len(reservation.sources) < 2:  # of several each has some
        raise NotOffered(f"{operation}: groups {sorted(missing)} are reserved, and this cache has none of them")
