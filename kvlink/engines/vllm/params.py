"""``kv_transfer_params``: what routers carry from the prefill request's answer to the decode request.

The keys are those of vLLM's NixlConnector, so that routers made for it need no change; none of them is looked at
but `do_remote_decode`, `do_remote_prefill` and `remote_num_tokens`. kvlink's ticket rides along under `kvlink`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvlink.errors import TicketInvalid
from kvlink.handoff.address import join_address, split_address
from kvlink.handoff.ticket import Ticket, parse_ticket

__all__ = [
    "TICKET_KEY",
    "EngineFacts",
    "Meeting",
    "RemotePrefill",
    "prefilled",
    "pushed",
    "wants_prefill_kept",
    "wants_remote_prefill",
]

TICKET_KEY = "kvlink"
"""Where a ticket is in the parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What the parameters say of the engine that has prefilled."""

    engine_id: str
    tp_size: int = 1
    dcp_size: int = 1
    pp_size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePrefill:
    """What a decode request says of its prefill.

    Attributes
    ----------
    ticket
        As it came.
    parsed
        Its fields.
    num_tokens
        Tokens of the prompt that prefill has computed; the ticket may be for more, up to the end of a block.
    """

    ticket: dict[str, Any]
    parsed: Ticket
    num_tokens: int

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> RemotePrefill:
        """Read the parameters of a request whose prefill is elsewhere.

        Raises
        ------
        TicketInvalid
            If there is no ticket, it was altered, or its numbers contradict the other parameters.
        """
        ticket = params.get(TICKET_KEY)
        if ticket is None:
            raise TicketInvalid(
                f"kv_transfer_params has no {TICKET_KEY!r}: was the prefill engine started with KvlinkConnector, and "
                "does the router pass on all of the parameters that it answers with?"
            )
        parsed = parse_ticket(ticket)
        num_tokens = params.get("remote_num_tokens", parsed.num_tokens)
        if isinstance(num_tokens, bool) or not isinstance(num_tokens, int) or not 0 <= num_tokens <= parsed.num_tokens:
            raise TicketInvalid(
                f"ticket {parsed.id} is for {parsed.num_tokens} tokens, and remote_num_tokens is {num_tokens!r}: "
                "pass on exactly what the prefill engine answered"
            )
        return cls(ticket=dict(ticket), parsed=parsed, num_tokens=num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """How the two sides of a push find each other, where the router sends both their request at once.

    Attributes
    ----------
    transfer_id
        The router's: any text that no other request has.
    address
        ``host:port`` of the prefill engine's first rank; empty on the prefill side.
    """

    transfer_id: str
    address: str = ""

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Meeting | None:
        """Return what the parameters say of it, ``None`` if they have no `transfer_id`, or have a ticket.

        Raises
        ------
        TicketInvalid
            If a decode request does not say where prefill is, or the id is no text of moderate length.
        """
        transfer_id = params.get("transfer_id")
        if transfer_id is None or params.get(TICKET_KEY) is not None:
            return None
        if not isinstance(transfer_id, str) or not transfer_id.isprintable() or not 1 <= len(transfer_id) <= 200:
            raise TicketInvalid(f"transfer_id is {transfer_id!r:.80}: it must be printable text of 1 to 200 characters")
        if not params.get("do_remote_prefill"):
            return cls(transfer_id=transfer_id)
        host, port = params.get("remote_host"), params.get("remote_port")
        if not isinstance(host, str) or isinstance(port, bool) or not isinstance(port, int):
            raise TicketInvalid(
                f"transfer_id {transfer_id!r}: remote_host is {host!r} and remote_port {port!r}: a request that is "
                "pushed needs the address that its prefill engine listens at"
            )
        address = join_address(host, port)
        try:
            split_address(address)
        except ValueError as error:
            raise TicketInvalid(f"transfer_id {transfer_id!r}: {error}") from None
        return cls(transfer_id=transfer_id, address=address)


def wants_prefill_kept(params: Mapping[str, Any] | None) -> bool:
    """Whether a request asks for its prefill to be kept for a decode elsewhere."""
    return bool(params) and bool((params or {}).get("do_remote_decode"))


def wants_remote_prefill(params: Mapping[str, Any] | None) -> bool:
    """Whether a request's prefill is elsewhere, and was not asked for yet."""
    return bool(params) and bool((params or {}).get("do_remote_prefill"))


def prefilled(
    engine: EngineFacts, request_id: str, *, ticket: Mapping[str, Any], blocks: Sequence[Sequence[int]], num_tokens: int
) -> dict[str, Any]:
    """Return the parameters of a finished prefill, which survive JSON."""
    host, port = split_address(ticket["sources"][0]["address"])
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(map(int, table)) for table in blocks],
        "remote_engine_id": engine.engine_id,
        "remote_request_id": request_id,
        "remote_host": host,
        "remote_port": port,
        "tp_size": engine.tp_size,
        "dcp_size": engine.dcp_size,
        "pp_size": engine.pp_size,
        "remote_num_tokens": num_tokens,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        TICKET_KEY: dict(ticket),
    }


def pushed(engine: EngineFacts, request_id: str, *, transfer_id: str, num_tokens: int) -> dict[str, Any]:
    """Return the parameters of a prefill that is pushed: nothing that anybody could pull."""
    return {
        "do_remote_prefill": False,
        "do_remote_decode": False,
        "remote_engine_id": engine.engine_id,
        "remote_request_id": request_id,
        "remote_num_tokens": num_tokens,
        "transfer_id": transfer_id,
        "transfer_mode": "push",
    }
