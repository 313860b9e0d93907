"""Sending a ticket to a worker by the program's own means, and waiting until that has read everything."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from kvlink.handoff import Handle, Node, Offer
from kvlink.handoff.block_tables import Blocks
from kvlink.scheduler.book import DecodeWorker, Placement
from kvlink.scheduler.reports import HandOffReport

__all__ = ["Parcel", "hand_over", "see_released"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """What is to be handed over, wherever it goes."""

    blocks: Blocks
    num_tokens: int
    room_tokens: int
    payload: bytes
    label: str
    prefix_hashes: Sequence[Hashable] = ()

    @classmethod
    def of(cls, placement: Placement, blocks: Blocks, num_tokens: int, *, label: str, payload: bytes = b"") -> Parcel:
        """Return what goes where `placement` says."""
        return cls(
            blocks=blocks,
            num_tokens=num_tokens,
            room_tokens=placement.num_tokens,
            payload=payload,
            label=label,
            prefix_hashes=placement.prefix_hashes,
        )


async def hand_over(node: Node, worker: DecodeWorker, parcel: Parcel, *, ttl_s: float) -> HandOffReport:
    """Offer `parcel`, send the ticket to `worker`, and wait until it has read everything."""
    started = time.monotonic()
    offer = node.offer(
        parcel.blocks, num_tokens=parcel.num_tokens, ttl_s=ttl_s, label=parcel.label, payload=parcel.payload
    )
    reply = await _deliver(worker, offer)
    return HandOffReport(
        worker=worker.name,
        handoff=offer.id,
        seconds=time.monotonic() - started,
        phases_s=offer.phases_s,
        reply=reply,
    )


async def _deliver(worker: DecodeWorker, offer: Offer) -> Any:
    """Send the ticket and wait for the reading; when either fails, withdraw the offer."""
    sending = asyncio.ensure_future(_send(worker, offer.ticket))
    reading = asyncio.ensure_future(_outcome(offer))
    try:
        reply, _ = await asyncio.gather(sending, reading)
    except BaseException:
        offer.cancel()
        raise
    finally:
        sending.cancel()
        reading.cancel()
        await see_released(offer)
    return reply


async def _send(worker: DecodeWorker, ticket: dict[str, Any]) -> Any:
    reply = worker.hand_off(ticket)
    return await reply if inspect.isawaitable(reply) else reply


async def _outcome(offer: Offer) -> None:
    await offer


async def see_released(handle: Handle) -> None:
    """Wait for it whatever happens, cancellation included: the caller will reuse the blocks."""
    released = asyncio.ensure_future(handle.until_released())
    cancelled = None
    while not released.done():
        try:
            await asyncio.shield(released)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
