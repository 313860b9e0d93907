"""What travels through any router, as JSON, from whoever offers to the nodes that pull.

A ticket names a handoff and where its sources listen: one node, or all the ranks that hold a part
of the cache. It grants nothing by itself: a source serves a claim only over a connection whose
dialer proved the secret. The ``check`` is not keyed, since a scheduler that holds no secret may
make tickets; it catches what was cut, mixed up or edited. Whoever edits address and check together
gains nothing, since the node at the new address must prove both the secret and the source's epoch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence, Set
from typing import Annotated, Any

import msgspec

from kvlink.errors import NotOffered, TicketInvalid
from kvlink.handoff.address import split_address

__all__ = ["MOST_SOURCES", "Ticket", "TicketSource", "copy_of", "make_ticket", "parse_ticket"]

TICKET_VERSION = 1

MOST_SOURCES = 1024
"""Ranks that one ticket may name."""

_encode = msgspec.msgpack.Encoder().encode
_MOST_SEQUENCE = (1 << 63) - 1

_Hex32 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
_Id = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}-(0|[1-9][0-9]{0,18})$")]
_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class TicketSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One node that offers a part.

    Attributes
    ----------
    name
        For messages to people.
    address
        ``host:port`` at which it listens.
    epoch
        Its life, in hexadecimal.
    """

    name: _Text
    address: _Text
    epoch: _Hex32

    @property
    def epoch_bytes(self) -> bytes:
        """Its life, as the native core takes it."""
        return bytes.fromhex(self.epoch)


class Ticket(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of a ticket, checked.

    Attributes
    ----------
    kvlink
        Version of the ticket's own form.
    id
        ``<epoch>-<sequence>`` of whoever made it, a node or a mint: the handoff, unique over all
        nodes and restarts.
    sources
        The nodes that every reader claims, each with a part of the cache, all of it, or a copy.
    num_tokens
        Tokens offered.
    groups
        Names of the cache groups that the sources have together.
    readers
        How many pulls may succeed.
    ttl_ms
        How long each source keeps its offer, by its own clock.
    check
        Digest over the other fields.
    """

    kvlink: Annotated[int, msgspec.Meta(ge=1, le=1)]
    id: _Id
    sources: Annotated[list[TicketSource], msgspec.Meta(min_length=1, max_length=MOST_SOURCES)]
    num_tokens: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    groups: Annotated[list[_Text], msgspec.Meta(min_length=1, max_length=64)]
    readers: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    ttl_ms: Annotated[int, msgspec.Meta(ge=1, le=86_400_000)]
    check: _Hex32

    @property
    def epoch_bytes(self) -> bytes:
        """The life of whoever made the ticket, as the native core takes it."""
        return bytes.fromhex(self.id.partition("-")[0])

    @property
    def sequence(self) -> int:
        """The handoff's number in that life."""
        return int(self.id.partition("-")[2])

    @property
    def title(self) -> str:
        """For messages: the id and the names of the sources, as far as they fit."""
        names = [source.name for source in self.sources]
        rest = f" and {len(names) - 4} more" if len(names) > 4 else ""
        return f"{self.id} from {', '.join(names[:4])}{rest}"

    def check_has(self, groups: Set[str], operation: str) -> None:
        """Raise ``NotOffered`` if it lacks one of `groups`."""
        missing = groups - set(self.groups)
        if missing:
            raise NotOffered(f"{operation}: groups {sorted(missing)} of this cache are not among {self.groups}")


def make_ticket(
    *,
    epoch: bytes,
    sequence: int,
    sources: Sequence[TicketSource],
    num_tokens: int,
    groups: Sequence[str],
    readers: int,
    ttl_ms: int,
) -> dict[str, Any]:
    """Return the ticket of one offer, as a dict that survives JSON."""
    fields: dict[str, Any] = {
        "kvlink": TICKET_VERSION,
        "id": f"{epoch.hex()}-{sequence}",
        "sources": [{"name": one.name, "address": one.address, "epoch": one.epoch} for one in sources],
        "num_tokens": num_tokens,
        "groups": list(groups),
        "readers": readers,
        "ttl_ms": ttl_ms,
    }
    fields["check"] = _check_of(fields["id"], sources, num_tokens, groups, readers, ttl_ms)
    return fields


def copy_of(ticket: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy that shares nothing with `ticket`, which ``parse_ticket`` accepts."""
    sources = [dict(source) for source in ticket["sources"]]
    return {**ticket, "sources": sources, "groups": list(ticket["groups"])}


def parse_ticket(ticket: object) -> Ticket:
    """Return the fields of `ticket`, which may come from anywhere.

    Raises
    ------
    TicketInvalid
        If anything about it is off; the message says what.
    """
    if not isinstance(ticket, Mapping):
        raise TicketInvalid(f"a ticket is a mapping with text keys, not {_described(ticket)}: decode its JSON first")
    fields = dict(ticket)
    version = fields.get("kvlink")
    if isinstance(version, int) and not isinstance(version, bool) and version > TICKET_VERSION:
        raise TicketInvalid(f"ticket version {version} is newer than {TICKET_VERSION}: upgrade this kvlink")
    try:
        parsed: Ticket = msgspec.convert(fields, Ticket, strict=True)
    except (msgspec.ValidationError, RecursionError) as error:
        raise TicketInvalid(f"not a ticket: {error}; pass on exactly what offer.ticket gave") from None
    expected = _check_of(parsed.id, parsed.sources, parsed.num_tokens, parsed.groups, parsed.readers, parsed.ttl_ms)
    if expected != parsed.check:
        raise TicketInvalid(f"ticket {parsed.id}: its check does not fit its fields: it was altered on its way")
    if parsed.sequence > _MOST_SEQUENCE:
        raise TicketInvalid(f"ticket {parsed.id}: its sequence is more than 63 bits hold")
    _check_sources(parsed)
    return parsed


def _check_sources(ticket: Ticket) -> None:
    if len({source.epoch for source in ticket.sources}) != len(ticket.sources):
        raise TicketInvalid(f"ticket {ticket.id}: it names a source twice")
    for source in ticket.sources:
        try:
            split_address(source.address)
        except ValueError as error:
            raise TicketInvalid(f"ticket {ticket.id}: {error}") from None


def _check_of(*fields: object) -> str:
    """Return a digest against accidents: every pull makes it, and it keeps nobody from making another."""
    return hashlib.blake2b(_encode((TICKET_VERSION, *fields)), digest_size=16, person=b"kvlink ticket").hexdigest()


def _described(ticket: object) -> str:
    return f"{type(ticket).__name__} {str(ticket)[:40]!r}"
