"""Sending a ticket to a worker by the program's own means, and waiting until that has read everything."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

from kvlink.handoff import Handle, Offer
from kvlink.scheduler.book import DecodeWorker

__all__ = ["deliver", "see_released"]


async def deliver(worker: DecodeWorker, offer: Offer) -> Any:
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
