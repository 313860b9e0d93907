"""The ticket of a reservation: what travels from the node that has reserved to the one that pushes.

It names the blocks' node and grants nothing by itself, as an offer's does: a push is taken only over
a connection whose two ends have proved the secret.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from kvlink.errors import InvalidArgument, TicketInvalid
from kvlink.handoff.address import split_address
from kvlink.handoff.ticket import MOST_SOURCES, TicketSource

__all__ = ["Reservation", "make_reservation", "parse_reservation", "parse_sources"]

RESERVATION_VERSION = 1

_encode = msgspec.msgpack.Encoder().encode
_MOST_SEQUENCE = (1 << 63) - 1

_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class Reservation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of a reservation's ticket, checked.

    Attributes
    ----------
    kvlink
        Version of the ticket's own form.
    reservation
        ``<epoch>-<sequence>`` of the node that has reserved: the handoff, unique over all nodes and restarts.
    target
        That node.
    num_tokens
        Tokens that are to be pushed.
    skip_tokens
        The first of them that are there already, and are not taken.
    groups
        Names of the cache groups of the target.
    ttl_ms
        How long the target waits for the bytes, by its own clock.
    sources
        The nodes that push, each what it was elected to deliver; empty: one node, whichever comes first.
    check
        Digest over the other fields.
    """

    kvlink: Annotated[int, msgspec.Meta(ge=1, le=1)]
    reservation: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}-(0|[1-9][0-9]{0,18})$")]
    target: TicketSource
    num_tokens: _Tokens
    skip_tokens: _Tokens
    groups: Annotated[list[_Text], msgspec.Meta(min_length=1, max_length=64)]
    ttl_ms: Annotated[int, msgspec.Meta(ge=1, le=86_400_000)]
    check: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
    sources: Annotated[list[TicketSource], msgspec.Meta(max_length=MOST_SOURCES)] = []

    @property
    def native_id(self) -> tuple[bytes, int]:
        """Epoch and sequence, as the native core takes them."""
        epoch, _, sequence = self.reservation.partition("-")
        return bytes.fromhex(epoch), int(sequence)

    @property
    def title(self) -> str:
        """For messages: the id and the name of the target."""
        return f"{self.reservation} to {self.target.name}"


def make_reservation(
    *,
    epoch: bytes,
    sequence: int,
    target: TicketSource,
    num_tokens: int,
    skip_tokens: int,
    groups: Sequence[str],
    ttl_ms: int,
    sources: Sequence[TicketSource] = (),
) -> dict[str, Any]:
    """Return the ticket of one reservation, as a dict that survives JSON."""
    fields: dict[str, Any] = {
        "kvlink": RESERVATION_VERSION,
        "reservation": f"{epoch.hex()}-{sequence}",
        "target": {"name": target.name, "address": target.address, "epoch": target.epoch},
        "num_tokens": num_tokens,
        "skip_tokens": skip_tokens,
        "groups": list(groups),
        "ttl_ms": ttl_ms,
    }
    if sources:
        fields["sources"] = [{"name": one.name, "address": one.address, "epoch": one.epoch} for one in sources]
    fields["check"] = _check_of(sources, fields["reservation"], target, num_tokens, skip_tokens, groups, ttl_ms)
    return fields


def parse_reservation(ticket: object) -> Reservation:
    """Return the fields of `ticket`, which may come from anywhere.

    Raises
    ------
    TicketInvalid
        If anything about it is off; the message says what.
    """
    if not isinstance(ticket, Mapping):
        raise TicketInvalid(f"a ticket is a mapping with text keys, not {type(ticket).__name__}: decode its JSON first")
    fields = dict(ticket)
    if "sources" in fields and "reservation" not in fields:
        raise TicketInvalid("this is the ticket of an offer, which is pulled: push into what slot.ticket gave")
    version = fields.get("kvlink")
    if isinstance(version, int) and not isinstance(version, bool) and version > RESERVATION_VERSION:
        raise TicketInvalid(f"ticket version {version} is newer than {RESERVATION_VERSION}: upgrade this kvlink")
    try:
        parsed: Reservation = msgspec.convert(fields, Reservation, strict=True)
    except (msgspec.ValidationError, RecursionError) as error:
        raise TicketInvalid(f"not a reservation's ticket: {error}; pass on exactly what slot.ticket gave") from None
    told = (
        parsed.reservation,
        parsed.target,
        parsed.num_tokens,
        parsed.skip_tokens,
        parsed.groups,
        parsed.ttl_ms,
    )
    if _check_of(parsed.sources, *told) != parsed.check:
        raise TicketInvalid(f"ticket {parsed.reservation}: its check does not fit its fields: it was altered")
    if parsed.native_id[1] > _MOST_SEQUENCE or parsed.skip_tokens > parsed.num_tokens:
        raise TicketInvalid(f"ticket {parsed.reservation}: its numbers contradict each other")
    if not parsed.reservation.startswith(parsed.target.epoch):
        raise TicketInvalid(f"ticket {parsed.reservation}: it is of another node than its target")
    if len({source.epoch for source in parsed.sources}) != len(parsed.sources):
        raise TicketInvalid(f"ticket {parsed.reservation}: it names a source twice")
    try:
        for node in (parsed.target, *parsed.sources):
            split_address(node.address)
    except ValueError as error:
        raise TicketInvalid(f"ticket {parsed.reservation}: {error}") from None
    return parsed


def parse_sources(descriptors: Sequence[Mapping[str, Any]]) -> list[TicketSource]:
    """Return the nodes that a reservation is for, from their descriptors or from the sources of a ticket.

    Raises
    ------
    InvalidArgument
        If one is malformed or appears twice, or there are too many.
    """
    called = "reserve: sources"
    if isinstance(descriptors, Mapping | str) or not isinstance(descriptors, Sequence):
        raise InvalidArgument(f"{called}: it is a list of what node.descriptor gives, not {descriptors!r:.80}")
    if len(descriptors) > MOST_SOURCES:
        raise InvalidArgument(f"{called}: {len(descriptors)} nodes, at most {MOST_SOURCES} can push together")
    sources = []
    try:
        for descriptor in descriptors:
            fields = {name: descriptor[name] for name in ("name", "address", "epoch")}
            sources.append(msgspec.convert(fields, TicketSource, strict=True))
            split_address(sources[-1].address)
    except (msgspec.ValidationError, KeyError, TypeError, ValueError) as error:
        raise InvalidArgument(f"{called}: not what node.descriptor gives: {error}") from None
    if len({source.epoch for source in sources}) != len(sources):
        raise InvalidArgument(f"{called}: a node appears twice")
    return sources


def _check_of(sources: Sequence[TicketSource], *fields: object) -> str:
    named = (list(sources),) if sources else ()
    packed = _encode((RESERVATION_VERSION, *fields, *named))
    return hashlib.blake2b(packed, digest_size=16, person=b"kvlink reserve").hexdigest()
