"""Handing a request to a decode worker that runs a ``DecodeService``: one try, and what came of it."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from kvlink.directory import WorkerEntry
from kvlink.errors import Busy, InvalidArgument, KvlinkError, PeerLost
from kvlink.handoff import Node, Push
from kvlink.handoff.asking import ask
from kvlink.handoff.descriptor import parse_descriptor
from kvlink.scheduler.delivering import Parcel, see_released
from kvlink.scheduler.messages import RESERVE, STAND, WITHDRAW, Reserve, Reserved, Withdraw, pack, sendable, unpack

__all__ = ["Mover", "NoRoom", "OurFault", "as_error"]

# Questions to one worker at a time. Each worker has threads of its own, so that a slow one holds up nobody else's.
_ASKED_AT_ONCE = 4
# A worker that does not answer for so long is given up, though the request's own deadline may be later.
_ANSWER_S = 2.0
_LEAST_S = 0.001


class NoRoom(Exception):
    """The worker has answered that it has none. Stays inside ``kvlink.scheduler``."""


class OurFault(Exception):
    """``error`` is of this side, and would be the same with any worker. Stays inside ``kvlink.scheduler``."""

    def __init__(self, error: KvlinkError) -> None:
        super().__init__(str(error))
        self.error = error


class Mover:
    """Asks workers for blocks, for `node` and for `ranks` that push beside it, and pushes into them. Thread-safe.

    Raises ``InvalidArgument`` if `ranks` are not the descriptors of other nodes, each once.
    """

    def __init__(self, node: Node, ranks: Sequence[Mapping[str, Any]] = ()) -> None:
        self._node = node
        self._ranks = [parse_descriptor(rank).source for rank in ranks]
        if len({node.epoch, *(rank.epoch for rank in self._ranks)}) != 1 + len(self._ranks):
            raise InvalidArgument("scheduler: ranks names a node twice, or the scheduler's own")
        self._process = os.urandom(8).hex()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._callers: dict[str, ThreadPoolExecutor] = {}  # by epoch

    def check_alone(self, operation: str) -> None:
        """Raise ``InvalidArgument`` if there are other ranks, which have to push too."""
        if self._ranks:
            raise InvalidArgument(
                f"{operation}: this engine has other ranks: begin, give them the push's ticket; each pushes its part"
            )

    async def move(
        self, entry: WorkerEntry, *, parcel: Parcel, until: float, answered: Callable[[Reserved], None]
    ) -> Push:
        """Bring `parcel` to the worker of `entry`; return the push, which has succeeded and is released.

        `answered` hears how the worker stands, as soon as that is known. However this ends, the
        parcel's blocks are free of it, and the worker's go back to it.

        Raises
        ------
        NoRoom
            If the worker would not have it.
        OurFault
            If the push cannot begin, which no other worker can help.
        KvlinkError
            Whatever kept it from arriving.
        """
        request = self._fresh_id()
        push = await self._reserve_and_begin(entry, parcel, request, until=until, answered=answered)
        try:
            push.commit(payload=parcel.payload)
            await push
        except InvalidArgument as error:
            raise OurFault(error) from error
        finally:
            if push.outcome != "succeeded":
                push.cancel()
                self._withdraw(entry, request)  # a push that has failed here cannot succeed there
            await see_released(push)
        return push

    async def begin(
        self, entry: WorkerEntry, *, parcel: Parcel, until: float, answered: Callable[[Reserved], None]
    ) -> Push:
        """Reserve at the worker of `entry`, and return a push that has begun. Raises as ``move`` does."""
        return await self._reserve_and_begin(entry, parcel, self._fresh_id(), until=until, answered=answered)

    def ask_standing(self, entry: WorkerEntry) -> Future[bytes]:
        """Ask a worker how it stands; what comes of that is a packed ``Reserved``."""
        return self._ask(entry, STAND, b"", deadline_s=_ANSWER_S)

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

    def _fresh_id(self) -> str:
        return f"{self._process}-{next(self._numbers)}"

    async def _reserve_and_begin(
        self,
        entry: WorkerEntry,
        parcel: Parcel,
        request: str,
        *,
        until: float,
        answered: Callable[[Reserved], None],
    ) -> Push:
        try:
            ticket = await self._reserve(entry, parcel, request, until=until, answered=answered)
            return self._push(ticket, parcel, until=until)
        except NoRoom:
            raise
        except BaseException:
            self._withdraw(entry, request)  # whatever it knows of this
            raise

    def _push(self, ticket: dict[str, Any], parcel: Parcel, *, until: float) -> Push:
        remaining_s = max(_LEAST_S, until - time.monotonic())
        try:
            return self._node.push(ticket, parcel.blocks, deadline_s=remaining_s, label=parcel.label)
        except KvlinkError as error:
            raise OurFault(error) from error

    async def _reserve(
        self,
        entry: WorkerEntry,
        parcel: Parcel,
        request: str,
        *,
        until: float,
        answered: Callable[[Reserved], None],
    ) -> dict[str, Any]:
        remaining_s = max(_LEAST_S, until - time.monotonic())
        question = Reserve(
            request=request,
            num_tokens=parcel.num_tokens,
            room_tokens=parcel.room_tokens,
            ttl_ms=max(1, round(1000 * remaining_s)),
            label=parcel.label,
            prefix_hashes=sendable(parcel.prefix_hashes),
            sources=self._ranks,
        )
        asked = self._ask(entry, RESERVE, pack(question), deadline_s=min(remaining_s, _ANSWER_S))
        reserved = unpack(await asyncio.wrap_future(asked), Reserved)
        answered(reserved)
        if reserved.ticket is None:
            raise NoRoom(f"{entry.name} has no room for {parcel.room_tokens} tokens")
        return reserved.ticket

    def _withdraw(self, entry: WorkerEntry, request: str) -> None:
        """Tell the worker that nothing comes, without waiting: if it is gone, so are its blocks."""
        if entry.epoch in self._callers:  # not once it has left the directory
            self._ask(entry, WITHDRAW, pack(Withdraw(request=request)), deadline_s=_ANSWER_S)

    def _ask(self, entry: WorkerEntry, kind: str, body: bytes, *, deadline_s: float) -> Future[bytes]:
        until = time.monotonic() + deadline_s
        with self._lock:
            caller = self._callers.get(entry.epoch)
            if caller is None:
                caller = ThreadPoolExecutor(_ASKED_AT_ONCE, thread_name_prefix="kvlink-ask")
                self._callers[entry.epoch] = caller
            return caller.submit(self._ask_now, entry, kind, body, until)

    def _ask_now(self, entry: WorkerEntry, kind: str, body: bytes, until: float) -> bytes:
        def once() -> bytes:
            remaining_s = max(_LEAST_S, until - time.monotonic())
            return ask(self._node, entry.address, kind, body=body, deadline_s=remaining_s, epoch=entry.epoch)

        try:
            return once()
        except PeerLost:
            # The connection may have been an old one that the worker has just ended, or the answer is lost. It knows
            # the request by its id, and does nothing twice.
            return once()


def as_error(failure: KvlinkError | NoRoom) -> KvlinkError:
    """Return why a worker did not take a request, as users see it."""
    return failure if isinstance(failure, KvlinkError) else Busy(str(failure))
