"""What travels through any router, as JSON, from the node that offers to the node that pulls.

A ticket names a handoff and where its source listens. It grants nothing by itself: the source
serves a claim only over a connection whose dialer proved the secret. The ``check`` is not keyed,
since a scheduler that holds no secret may make tickets; it catches what was cut, mixed up or edited.
Whoever edits address and check together gains nothing, since the node at the new address must
prove both the secret and the ticket's epoch.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from kvlink.errors import TicketInvalid
from kvlink.handoff.address import split_address

__all__ = ["Ticket", "make_ticket", "parse_ticket"]

TICKET_VERSION = 1

_Hex32 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class Ticket(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of a ticket, checked.

    Attributes
    ----------
    kvlink
        Version of the ticket's own form.
    id
        ``<epoch>-<sequence>``: the handoff, unique over all nodes and restarts.
    address
        ``host:port`` at which the source listens.
    name
        The source node's name, for messages to people.
    epoch
        The source's life, in hexadecimal.
    sequence
        The handoff's number in that life.
    num_tokens
        Tokens offered.
    groups
        Names of the cache groups offered.
    readers
        How many pulls may succeed.
    check
        Digest over the other fields.
    """

    kvlink: Annotated[int, msgspec.Meta(ge=1, le=1)]
    id: _Text
    address: _Text
    name: _Text
    epoch: _Hex32
    sequence: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    num_tokens: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    groups: Annotated[list[_Text], msgspec.Meta(min_length=1, max_length=64)]
    readers: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    check: _Hex32

    @property
    def epoch_bytes(self) -> bytes:
        """The source's life, as the native core takes it."""
        return bytes.fromhex(self.epoch)


def make_ticket(
    *, epoch: bytes, sequence: int, address: str, name: str, num_tokens: int, groups: list[str], readers: int
) -> dict[str, Any]:
    """Return the ticket of one offer, as a dict that survives JSON."""
    fields: dict[str, Any] = {
        "kvlink": TICKET_VERSION,
        "id": f"{epoch.hex()}-{sequence}",
        "address": address,
        "name": name,
        "epoch": epoch.hex(),
        "sequence": sequence,
        "num_tokens": num_tokens,
        "groups": groups,
        "readers": readers,
    }
    fields["check"] = _digest(fields)
    return fields


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
    expected = _digest({name: value for name, value in fields.items() if name != "check"})
    if not hmac.compare_digest(expected, parsed.check):
        raise TicketInvalid(f"ticket {parsed.id}: its check does not fit its fields: it was altered on its way")
    if parsed.id != f"{parsed.epoch}-{parsed.sequence}":
        raise TicketInvalid(f"ticket {parsed.id}: its id does not fit its epoch and sequence")
    try:
        split_address(parsed.address)
    except ValueError as error:
        raise TicketInvalid(f"ticket {parsed.id}: {error}") from None
    return parsed


def _digest(fields: Mapping[str, Any]) -> str:
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(b"kvlink ticket\0" + text.encode()).hexdigest()[:32]


def _described(ticket: object) -> str:
    return f"{type(ticket).__name__} {str(ticket)[:40]!r}"
