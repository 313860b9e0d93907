"""Whole requests between two nodes without the compiled part of kvlink: NumPy copies, UCX from Python carries.

The same caches and tickets as with ``kvlink.Node``, but another protocol: a node of this kind and one of
the other do not understand each other. There is one source a ticket, no push, no conversion, one lane, and
memory of the host alone. It is as right as the other and much slower.

The source packs the bytes that are asked for in one step while the offer lives, so what it sends is one state of
the blocks. The target writes its blocks in one step, once everything has arrived and its digest agrees:
after an error, nothing was written.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import time
from collections.abc import Awaitable
from typing import Any, TypeVar

import numpy as np

from kvlink.errors import (
    AlreadyClaimed,
    BlocksBusy,
    Closed,
    ConfigError,
    DataCorrupted,
    DeadlineExceeded,
    InvalidArgument,
    KvlinkError,
    LaneUnavailable,
    PeerLost,
    PeerUnreachable,
    ProtocolError,
    StalePeer,
    TicketExpired,
    UnknownHandoff,
    UnsupportedMemory,
)
from kvlink.fallback_wire import Claim, Conversation, Grant, digest_of, refusal_of
from kvlink.handoff.address import join_address, split_address
from kvlink.handoff.ticket import TicketSource, make_ticket, parse_ticket
from kvlink.layout import KVCache
from kvlink.plan.packed import Tables, Tokens, gather, packed_bytes, scatter, wanted_tokens
from kvlink.transport.python_two_sided import Bytes, Endpoint, TwoSided, load_two_sided

__all__ = ["PythonNode", "PythonOffer", "Pulled"]

_Result = TypeVar("_Result")
_MOST_TOKENS = 1 << 31
#: A dialer that says nothing for so long, or does not take its bytes, is left alone.
_SERVE_S = 30.0
_CLOSE_S = 1.0


class PythonOffer:
    """Blocks that others may read until ``readers`` have, or ``ttl_s`` has passed, or it was cancelled."""

    def __init__(self, *, ticket: dict[str, Any], tables: Tables, readers: int, ttl_s: float, payload: bytes) -> None:
        self.ticket = ticket
        self.payload = payload
        self.tables = tables
        self.num_tokens: int = ticket["num_tokens"]
        self._left = readers
        self._expires = time.monotonic() + ttl_s
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._error: KvlinkError | None = None

    @property
    def error(self) -> KvlinkError | None:
        """Why it failed, if it has."""
        if self._error is None and self._left and time.monotonic() >= self._expires:
            self.fail(TicketExpired(f"offer {self.ticket['id']}: its time ran out before all its readers had read it"))
        return self._error

    @property
    def released(self) -> bool:
        """Whether the blocks may be used for something else."""
        return self.error is not None or self._left == 0

    def check_alive(self) -> None:
        """Raise why nothing may be read from it any more."""
        if self.error is not None:
            raise self.error
        if self._left == 0:
            raise AlreadyClaimed(f"offer {self.ticket['id']}: all its readers have read it")

    def confirm(self) -> None:
        """Count one reader that has everything."""
        self.check_alive()
        self._left -= 1
        if self._left == 0:
            self._done.set_result(None)

    def fail(self, error: KvlinkError) -> None:
        """End it, unless it has ended."""
        if self._left and self._error is None:
            self._error = error
            self._done.set_result(None)

    async def wait(self, *, timeout_s: float) -> None:
        """Wait for the outcome, which comes when the offer's time is over at the latest.

        Raises
        ------
        KvlinkError
            The leaf that it failed with.
        DeadlineExceeded
            If `timeout_s` passed without an outcome; then the offer goes on.
        """
        until_end = max(0.0, self._expires - time.monotonic())
        await asyncio.wait([self._done], timeout=min(timeout_s, until_end))
        if self.error is not None:
            raise self.error
        if not self._done.done():
            raise DeadlineExceeded(f"wait for offer {self.ticket['id']}: no outcome within the timeout")


class Pulled:
    """What a pull has brought."""

    def __init__(self, *, nbytes: int, payload: bytes) -> None:
        self.bytes = nbytes
        self.payload = payload


class PythonNode:
    """One process's part in handoffs of whole requests. For one event loop; made by ``open``."""

    def __init__(self, cache: KVCache, *, name: str, secret: bytes, ucx: TwoSided) -> None:
        self.name = name
        self.address = ""
        self._cache = cache
        self._memory = [_bytes_of(region.address, region.nbytes) for region in cache.regions]
        self._secret = secret
        self._ucx = ucx
        self._epoch = os.urandom(16)
        self._sequence = 0
        self._offers: dict[str, PythonOffer] = {}
        self._written: set[tuple[str, int]] = set()
        self._listener: Any = None
        self._serving: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(
        cls,
        cache: KVCache,
        *,
        advertise: str,
        secret: str | bytes,
        name: str = "node",
        port: int = 0,
        ucx: TwoSided | None = None,
    ) -> PythonNode:
        """Return a node that listens on `port` of every interface, which peers reach at the host `advertise`.

        `ucx` stands in for `ucxx` or `ucp`.

        Raises
        ------
        ConfigError
            Without a secret: other hosts can reach it.
        UnsupportedMemory
            If the cache lies in GPU memory.
        UcxUnavailable
            If there is neither `ucxx` nor `ucp`.
        """
        if not secret:
            raise ConfigError("fallback: it listens on every interface, so pass secret= (the same on every node)")
        if any(region.kind != "host" for region in cache.regions):
            raise UnsupportedMemory("fallback: it hands over memory of the host only")
        key = secret.encode() if isinstance(secret, str) else secret
        node = cls(cache, name=name, secret=key, ucx=load_two_sided() if ucx is None else ucx)
        node._listener = node._ucx.create_listener(node._serve, port)
        node.address = join_address(advertise, node._listener.port)
        return node

    async def close(self) -> None:
        """Accept no more, and fail the offers that live. Whoever is being answered has a second left."""
        listener, self._listener = self._listener, None
        if self._serving:
            await asyncio.wait(self._serving, timeout=_CLOSE_S)
        if listener is not None:
            listener.close()
        for offer in self._offers.values():
            offer.fail(Closed(f"offer {offer.ticket['id']}: the node was closed"))
        self._offers.clear()

    def offer(
        self, blocks: Any, *, num_tokens: int, readers: int = 1, ttl_s: float = 30.0, payload: bytes = b""
    ) -> PythonOffer:
        """Let others read blocks, as ``kvlink.Node.offer`` does.

        Raises
        ------
        InvalidArgument
            If a table, `num_tokens`, `readers` or `ttl_s` is out of its bounds.
        Closed
            After ``close``.
        """
        if self._listener is None:
            raise Closed("offer: the node was closed")
        if readers < 1 or not 0 < ttl_s <= 86400:
            raise InvalidArgument(f"offer: readers={readers}, ttl_s={ttl_s}: at least one reader, at most a day")
        tables = self._tables(blocks, num_tokens=num_tokens, operation="offer")
        self._offers = {key: offer for key, offer in self._offers.items() if not offer.released}
        self._sequence += 1
        ticket = make_ticket(
            epoch=self._epoch,
            sequence=self._sequence,
            sources=[TicketSource(name=self.name, address=self.address, epoch=self._epoch.hex())],
            num_tokens=num_tokens,
            groups=self._cache.groups,
            readers=readers,
            ttl_ms=max(1, int(ttl_s * 1000)),
        )
        offer = PythonOffer(ticket=ticket, tables=tables, readers=readers, ttl_s=ttl_s, payload=payload)
        self._offers[ticket["id"]] = offer
        return offer

    async def pull(self, ticket: object, blocks: Any, *, skip_tokens: int = 0, deadline_s: float = 10.0) -> Pulled:
        """Read what a ticket names into blocks. Cancelling the task that awaits calls it off.

        Raises
        ------
        TicketInvalid, InvalidArgument, BlocksBusy
            If the arguments are not right.
        LaneUnavailable
            If the ticket names several sources: that takes the compiled part.
        DeadlineExceeded
            If it took longer than `deadline_s`.
        KvlinkError
            What the source refused it with, or how the connection failed.
        """
        parsed = parse_ticket(ticket)
        if len(parsed.sources) != 1:
            raise LaneUnavailable(
                f"pull {parsed.title}: it names {len(parsed.sources)} sources, and the Python transport reads from "
                "one: install kvlink with its compiled part"
            )
        if not 0 <= skip_tokens <= parsed.num_tokens:
            raise InvalidArgument(f"pull {parsed.title}: skip_tokens={skip_tokens} of {parsed.num_tokens} tokens")
        tables = self._tables(blocks, num_tokens=parsed.num_tokens, operation="pull")
        held = {(group, int(block)) for group, table in tables.items() for block in table if block >= 0}
        if both := held & self._written:
            raise BlocksBusy(f"pull {parsed.title}: another pull is under way into blocks {sorted(both)}")
        tokens = wanted_tokens(self._cache.layout, tables, skip_tokens=skip_tokens, num_tokens=parsed.num_tokens)
        self._written |= held
        try:
            late = f"pull {parsed.title}: the deadline passed"
            packed, payload = await _within(deadline_s, self._read(parsed.id, parsed.sources[0], tokens), late)
            scatter(self._cache.layout, self._memory, tables, tokens=tokens, packed=packed)
        finally:
            self._written -= held
        return Pulled(nbytes=len(packed), payload=payload)

    async def _read(self, handoff: str, source: TicketSource, tokens: Tokens) -> tuple[Bytes, bytes]:
        where = f"pull {handoff} from {source.name} ({source.address})"
        try:
            endpoint = await self._ucx.create_endpoint(*split_address(source.address))
        except Exception as error:
            raise PeerUnreachable(f"{where}: {error}") from error
        try:
            return await self._read_from(endpoint, handoff, source, tokens)
        except KvlinkError as error:
            raise type(error)(f"{where}: {error}") from error
        except Exception as error:  # whatever the UCX of the day raises
            raise PeerLost(f"{where}: the connection was lost: {error}") from error
        finally:
            await _closed(endpoint)

    async def _read_from(
        self, endpoint: Endpoint, handoff: str, source: TicketSource, tokens: Tokens
    ) -> tuple[Bytes, bytes]:
        talk = Conversation(endpoint, secret=self._secret)
        await talk.hear_hello()
        grant = await talk.ask(Claim.of(self._cache.layout, tokens, handoff=handoff, epoch=source.epoch_bytes))
        expected = packed_bytes(self._cache.layout, tokens)
        if grant.nbytes != expected:
            raise ProtocolError(f"it sends {grant.nbytes} bytes where {expected} are wanted")
        packed: Bytes = np.empty(expected, dtype=np.uint8)
        if expected:
            await endpoint.recv(packed)
        if digest_of(packed) != grant.digest:
            raise DataCorrupted("the digest of what arrived is not the source's: pull again")
        await talk.confirm()
        return packed, grant.payload

    async def _serve(self, endpoint: Endpoint) -> None:
        """Answer one dialer: called for each connection."""
        answering = asyncio.ensure_future(self._answer(endpoint))
        self._serving.add(answering)
        try:
            with contextlib.suppress(Exception):  # the dialer's own side tells what was wrong
                await asyncio.wait_for(answering, _SERVE_S)
            await _closed(endpoint)
        finally:
            self._serving.discard(answering)

    async def _answer(self, endpoint: Endpoint) -> None:
        talk = Conversation(endpoint, secret=self._secret)
        await talk.say_hello()
        claim = await talk.hear_claim()
        try:
            offer, packed = self._packed(claim)
        except KvlinkError as error:
            await talk.answer(refusal_of(error))
            return
        await talk.answer(Grant(nbytes=len(packed), digest=digest_of(packed), payload=offer.payload))
        if len(packed):
            await endpoint.send(packed)
        await talk.hear_confirm()
        try:
            offer.confirm()
        except KvlinkError as error:
            await talk.answer(refusal_of(error))
            return
        await talk.answer(Grant(nbytes=0, digest=b"", payload=b""))

    def _packed(self, claim: Claim) -> tuple[PythonOffer, Bytes]:
        """Return the offer and what the claim asks of it, in one step of the event loop."""
        if claim.epoch != self._epoch:
            raise StalePeer(f"the node {self.name!r} at this address was restarted: what was offered is gone")
        offer = self._offers.get(claim.handoff)
        if offer is None:
            raise UnknownHandoff(f"offer {claim.handoff}: this node has none of that number, or no longer")
        offer.check_alive()
        tokens = claim.wanted(most=max(offer.num_tokens, *map(len, offer.tables.values())))
        packed = gather(self._cache.layout, self._memory, offer.tables, target=claim.layout, tokens=tokens)
        offer.check_alive()  # its owner may have reused the blocks at its end
        return offer, packed

    def _tables(self, blocks: Any, *, num_tokens: int, operation: str) -> Tables:
        if not 0 <= num_tokens < _MOST_TOKENS:
            raise InvalidArgument(f"{operation}: num_tokens={num_tokens}")
        groups = self._cache.layout.groups
        by_group = blocks if isinstance(blocks, dict) else {groups[0].name: blocks}
        if set(by_group) != set(self._cache.groups):
            raise InvalidArgument(
                f"{operation}: blocks has {sorted(by_group)}, the cache has {list(self._cache.groups)}"
            )
        tables = {}
        for group in groups:
            table = np.asarray(by_group[group.name], dtype=np.int64)
            needed = len(table) if group.slots else -(-num_tokens // group.block_tokens)
            used = table[:needed]
            real = used[used >= 0]
            if len(used) < needed or (used < -1).any() or (real >= group.num_blocks).any():
                raise InvalidArgument(
                    f"{operation}: blocks[{group.name!r}] needs {needed} entries in [-1, {group.num_blocks})"
                )
            if operation == "pull" and len(np.unique(real)) != len(real):
                raise InvalidArgument(f"{operation}: blocks[{group.name!r}] has a block twice")
            tables[group.name] = used.astype(np.int32)
        return tables


async def _within(seconds: float, work: Awaitable[_Result], late: str) -> _Result:
    try:
        return await asyncio.wait_for(work, seconds)
    except (asyncio.TimeoutError, TimeoutError) as error:
        if isinstance(error, KvlinkError):
            raise
        raise DeadlineExceeded(late) from None


async def _closed(endpoint: Endpoint) -> None:
    with contextlib.suppress(Exception):
        await asyncio.wait_for(endpoint.close(), _CLOSE_S)


def _bytes_of(address: int, nbytes: int) -> Bytes:
    found: Bytes = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
    return found
