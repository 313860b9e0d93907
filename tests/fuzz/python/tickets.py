"""Tickets of offers and of reservations, and descriptors: JSON from any router.

Their check is recomputed for most inputs, since without it hardly one gets past it. What is taken says the same when it
is made anew from what was read.
"""

from __future__ import annotations

from typing import Any

import msgspec

from fuzz.draws import Draws
from fuzz.samples import descriptor, reservation, ticket
from kvlink.errors import InvalidArgument, TicketInvalid
from kvlink.handoff import reservation as of_reservations
from kvlink.handoff import ticket as of_tickets
from kvlink.handoff.descriptor import parse_descriptor
from kvlink.handoff.reservation import make_reservation, parse_reservation
from kvlink.handoff.ticket import copy_of, make_ticket, parse_ticket

_TICKET, _RESERVATION, _DESCRIPTOR = ticket(), reservation(), descriptor()


def _with_check(fields: Any, kind: type[msgspec.Struct], check_of: Any) -> Any:
    """Return `fields` with the check of what they say, as far as they say something."""
    if not isinstance(fields, dict):
        return fields
    try:
        said: Any = msgspec.convert({**fields, "check": "0" * 32}, kind)
        values = [getattr(said, name) for name in said.__struct_fields__ if name not in ("kvlink", "check")]
    except (msgspec.ValidationError, TypeError):
        return fields
    return {**fields, "check": check_of(*values)}


def _offer(draws: Draws, raw: Any) -> None:
    given = raw if raw is not None else draws.spoiled(_TICKET)
    if draws.byte() < 224:
        given = _with_check(given, of_tickets.Ticket, of_tickets._check_of)
    try:
        parsed = parse_ticket(given)
    except TicketInvalid:
        return
    again = make_ticket(
        epoch=parsed.epoch_bytes,
        sequence=parsed.sequence,
        sources=parsed.sources,
        num_tokens=parsed.num_tokens,
        groups=parsed.groups,
        readers=parsed.readers,
        ttl_ms=parsed.ttl_ms,
    )
    assert again == given == copy_of(given)
    assert parsed.title


def _reserve(draws: Draws, raw: Any) -> None:
    given = raw if raw is not None else draws.spoiled(_RESERVATION)
    if draws.byte() < 224:
        given = _with_check(given, of_reservations.Reservation, of_reservations._check_of)
    try:
        parsed = parse_reservation(given)
    except TicketInvalid:
        return
    epoch, sequence = parsed.native_id
    again = make_reservation(
        epoch=epoch,
        sequence=sequence,
        target=parsed.target,
        num_tokens=parsed.num_tokens,
        skip_tokens=parsed.skip_tokens,
        groups=parsed.groups,
        ttl_ms=parsed.ttl_ms,
    )
    assert again == given
    assert parsed.skip_tokens <= parsed.num_tokens


def _describe(draws: Draws, raw: Any) -> None:
    try:
        parsed = parse_descriptor(raw if raw is not None else draws.spoiled(_DESCRIPTOR))
    except InvalidArgument:
        return
    assert parse_descriptor(parsed.as_dict()) == parsed
    assert parsed.source.epoch == parsed.epoch


def one(data: bytes) -> None:
    """Parse something that is nearly a ticket, or any JSON."""
    draws = Draws(data)
    kind = draws.below(3)
    raw = None
    if draws.byte() >= 224:
        try:
            raw = msgspec.json.decode(draws.rest())
        except (msgspec.DecodeError, RecursionError):
            return
    (_offer, _reserve, _describe)[kind](draws, raw)
