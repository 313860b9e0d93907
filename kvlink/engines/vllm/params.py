"""``kv_transfer_params``: what routers carry from the prefill request's answer to the decode request.

The keys are those of vLLM's NixlConnector, so that routers made for it need no change; none of them is looked at
but `do_remote_decode`, `do_remote_prefill` and `remote_num_tokens`. kvlink's ticket rides along under `kvlink`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvlink.errors import TicketInvalid
from kvlink.handoff.address import split_address
from kvlink.handoff.ticket import Ticket, parse_ticket

__all__ = ["TICKET_KEY", "EngineFacts", "RemotePrefill", "prefilled", "wants_prefill_kept", "wants_remote_prefill"]

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
