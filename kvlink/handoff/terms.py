"""For whom, for how much and for how long an offer is: by its arguments, or by a ticket that was minted before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvlink.errors import InvalidArgument, StalePeer
from kvlink.handoff.arguments import check_count, check_milliseconds
from kvlink.handoff.mint import MOST_READERS, MOST_TOKENS
from kvlink.handoff.ticket import Ticket, TicketSource, copy_of, parse_ticket

__all__ = ["OfferTerms"]

_USUAL_TTL_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferTerms:
    """What an offer promises.

    Attributes
    ----------
    ticket
        The minted ticket; ``None`` where the node makes its own.
    minted
        Epoch and sequence of that ticket.
    """

    num_tokens: int
    readers: int
    ttl_ms: int
    ticket: dict[str, Any] | None = None
    minted: tuple[bytes, int] | None = None

    @classmethod
    def of(
        cls,
        ticket: Mapping[str, Any] | None,
        node: TicketSource,
        *,
        num_tokens: int | None,
        readers: int | None,
        ttl_s: float | None,
    ) -> OfferTerms:
        """Return the terms that the arguments of ``Node.offer`` mean at `node`.

        Raises
        ------
        InvalidArgument
            If one is missing or out of bounds, or differs from `ticket`, or that does not name `node`.
        StalePeer
            If `ticket` names `node` in another life.
        TicketInvalid
            If `ticket` is not one, or was altered.
        """
        if ticket is not None:
            parsed = parse_ticket(ticket)
            _check_named(parsed, node)
            minted = cls(
                num_tokens=parsed.num_tokens,
                readers=parsed.readers,
                ttl_ms=parsed.ttl_ms,
                ticket=copy_of(ticket),
                minted=(parsed.epoch_bytes, parsed.sequence),
            )
            minted._check_same("num_tokens", num_tokens)
            minted._check_same("readers", readers)
            minted._check_same("ttl_ms", None if ttl_s is None else check_milliseconds(ttl_s, called="offer: ttl_s"))
            return minted
        if num_tokens is None:
            raise InvalidArgument("offer: give num_tokens, or the minted ticket that says how many")
        return cls(
            num_tokens=check_count(num_tokens, low=0, high=MOST_TOKENS, called="offer: num_tokens"),
            readers=check_count(1 if readers is None else readers, low=1, high=MOST_READERS, called="offer: readers"),
            ttl_ms=check_milliseconds(_USUAL_TTL_S if ttl_s is None else ttl_s, called="offer: ttl_s"),
        )

    def _check_same(self, name: str, given: int | None) -> None:
        told = getattr(self, name)
        if given is not None and given != told:
            raise InvalidArgument(f"offer: {name} is {given!r}, and the ticket says {told}: leave it to the ticket")


def _check_named(ticket: Ticket, node: TicketSource) -> None:
    if ticket.id.startswith(node.epoch):
        raise InvalidArgument(f"offer: ticket {ticket.id} is of an offer of this node; a TicketMint makes others")
    if any(source.epoch == node.epoch for source in ticket.sources):
        return
    if any((source.name, source.address) == (node.name, node.address) for source in ticket.sources):
        raise StalePeer(
            f"offer: ticket {ticket.id} names an earlier life of {node.name}: make the mint anew from its descriptor"
        )
    raise InvalidArgument(
        f"offer: ticket {ticket.title} does not name this node, {node.name}: offer where its sources are"
    )
