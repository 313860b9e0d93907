"""Handing a request to a decode worker that runs a ``DecodeService``: one try, and what came of it."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvlink.directory import WorkerEntry
from kvlink.errors import PeerLost
from kvlink.handoff import Node, Offer
from kvlink.handoff.asking import ask
from kvlink.handoff.block_tables import Blocks
from kvlink.scheduler.delivering import see_released
from kvlink.scheduler.messages import RESERVE, Reserve, Reserved, pack, unpack

__all__ = ["Mover", "NoRoom", "Parcel"]

# Questions to one worker at a time. Each worker has threads of its own, so that a slow one holds up nobody else's.
_ASKED_AT_ONCE = 4
# A worker that does not answer for so long is given up, though the request's own deadline may be later.
_ANSWER_S = 5.0
_LEAST_S = 0.001


class NoRoom(Exception):
    """The worker has answered that it has none. Stays inside ``kvlink.scheduler``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """What is to be handed over, wherever it goes."""

    blocks: Blocks
    num_tokens: int
    room_tokens: int
    payload: bytes
    label: str


class Mover:
    """Offers blocks, asks a worker to take them, and waits until it has. Thread-safe.

    Parameters
    ----------
    lease_s
        How long the worker may say nothing: it renews the lease of an offer that it is reading, so
        one that dies or stands still is noticed this soon.
    """

    def __init__(self, node: Node, *, lease_s: float) -> None:
        self._node = node
        self._lease_s = lease_s
        self._process = os.urandom(8).hex()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._callers: dict[str, ThreadPoolExecutor] = {}  # by epoch

    def offer(self, parcel: Parcel, *, until: float) -> Offer:
        """Offer the blocks for one try. Raises as ``Node.offer`` does."""
        return self._node.offer(
            parcel.blocks,
            num_tokens=parcel.num_tokens,
            ttl_s=max(_LEAST_S, min(self._lease_s, until - time.monotonic())),
            label=parcel.label,
            payload=parcel.payload,
        )

    async def move(
        self,
        offer: Offer,
        entry: WorkerEntry,
        parcel: Parcel,
        *,
        until: float,
        answered: Callable[[Reserved], None],
    ) -> None:
        """Have `entry`'s worker read `offer`, which is released when this ends. `answered` hears what it said.

        Raises
        ------
        NoRoom
            If it would not have it.
        KvlinkError
            Whatever kept it from being read.
        """
        try:
            remaining_s = max(_LEAST_S, until - time.monotonic())
            question = Reserve(
                request=f"{self._process}-{next(self._numbers)}",
                room_tokens=parcel.room_tokens,
                ticket=offer.ticket,
                deadline_ms=max(1, round(1000 * remaining_s)),
                label=parcel.label,
            )
            reserved = await self._ask(entry, question, deadline_s=min(remaining_s, _ANSWER_S))
            answered(reserved)
            _check_accepted(reserved, entry, parcel)
            await offer
        except BaseException:
            offer.cancel()
            raise
        finally:
            await see_released(offer)

    def forget(self, epoch: str) -> None:
        """Let go of the threads for a worker that is gone."""
        with self._lock:
            caller = self._callers.pop(epoch, None)
        if caller is not None:
            caller.shutdown(wait=False)

    def close(self) -> None:
        """Let go of all threads; what is being asked ends with its own time."""
        for epoch in list(self._callers):
            self.forget(epoch)

    async def _ask(self, entry: WorkerEntry, question: Reserve, *, deadline_s: float) -> Reserved:
        with self._lock:
            caller = self._callers.get(entry.epoch)
            if caller is None:
                caller = ThreadPoolExecutor(_ASKED_AT_ONCE, thread_name_prefix="kvlink-ask")
                self._callers[entry.epoch] = caller
            asked = caller.submit(self._ask_now, entry, pack(question), time.monotonic() + deadline_s)
        return await asyncio.wrap_future(asked)

    def _ask_now(self, entry: WorkerEntry, body: bytes, until: float) -> Reserved:
        for is_last in (False, True):
            remaining_s = max(_LEAST_S, until - time.monotonic())
            try:
                return unpack(
                    ask(self._node, entry.address, RESERVE, body, deadline_s=remaining_s, epoch=entry.epoch), Reserved
                )
            except PeerLost:
                # The connection may have been an old one that the worker has just ended, or the answer is lost. It
                # knows the question by its id, and does nothing twice.
                if is_last:
                    raise
        raise AssertionError("unreachable")


def _check_accepted(reserved: Reserved, entry: WorkerEntry, parcel: Parcel) -> None:
    if not reserved.accepted:
        raise NoRoom(f"{entry.name} has no room for {parcel.room_tokens} tokens")
