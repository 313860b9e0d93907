"""The public face of one worker's end of all its handoffs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvlink.config import Limits
from kvlink.errors import ConfigError, InvalidArgument, LaneUnavailable, NotReady
from kvlink.handoff.arguments import (
    check_count,
    check_integrity,
    check_milliseconds,
    check_payload,
    check_seconds,
    check_text,
)
from kvlink.handoff.block_tables import Blocks, block_tables
from kvlink.handoff.handles import Offer, Pull
from kvlink.handoff.handshake import Secret, secrets_of
from kvlink.handoff.life import Life
from kvlink.handoff.mint import MOST_READERS
from kvlink.handoff.pushing import PushingNode
from kvlink.handoff.running import NodeSettings, Running
from kvlink.handoff.submitting import Submitting
from kvlink.handoff.terms import OfferTerms
from kvlink.handoff.ticket import make_ticket, parse_ticket
from kvlink.plan import check_conversions
from kvlink.transport import LANES, check_lanes

if TYPE_CHECKING:
    from kvlink.layout import KVCache

__all__ = ["Node"]

_MOST_COPY_THREADS = 256
# At exit nobody is left who could use the outcome; peers only need to see the connections close.
_EXIT_DEADLINE_S = 1.0


class Node(PushingNode, Submitting):
    """Offers the blocks of one cache to other nodes, and pulls theirs into it, or pushes. Thread-safe.

    Borrows the cache's memory until ``close`` has returned, and keeps it alive until then. A node
    that is forgotten, or is open when the interpreter exits, is closed. It does not survive a
    fork: in the child every call raises ``Closed``.

    Parameters
    ----------
    cache
        Where the blocks lie. Nothing is copied or registered before this.
    name
        What peers and messages call this node.
    listen
        ``host:port`` to accept connections at; port 0 takes any free one.
    secret
        What all nodes of a fleet share, or two of them during a rotation. Without one a node
        listens on loopback only, and any process of this host may pull what its tickets name.
    advertise
        Host, or ``host:port``, that tickets name instead of what `listen` says.
    limits
        Bounds on time, memory and peers.
    lanes
        The only lanes that pulls of this node may use; all by default.
    copy_threads
        Threads that copy; by default as many as this process may use.
    integrity
        ``"crc32c"`` or ``"xxh3"``: what is pulled here must have the checksums that its sources
        have, or the pull fails with ``DataCorrupted``; and offers of this node are checked by their
        readers. By default neither side pays for that.
    convert
        Which dtypes of a source become which of this cache, such as ``("float32->bfloat16",)``: any
        of ``float32``, ``float16`` and ``bfloat16``, rounded to nearest. Pulls of those take memory
        for what has arrived and is not converted yet. By default a source of another dtype is
        refused with ``LayoutMismatch``.

    Raises
    ------
    ConfigError
        If a setting is out of bounds, `convert` names what is not possible, the address cannot be
        bound, or it is reachable from other hosts without a secret.
    InvalidArgument, UnsupportedMemory
        If `cache` or `name` is not what it must be, or its memory cannot be handed over.
    OutOfMemory, UcxUnavailable, TransportFailed
        If the native core cannot start.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        name: str,
        listen: str = "127.0.0.1:0",
        secret: Secret | Sequence[Secret] | None = None,
        advertise: str | None = None,
        limits: Limits | None = None,
        lanes: Sequence[str] | None = None,
        copy_threads: int | None = None,
        integrity: str | None = None,
        convert: Sequence[str] = (),
    ) -> None:
        _check_cache(cache, "node")
        self._integrity = check_integrity(integrity, called="node: integrity")
        self._name = check_text(name, called="node: name", may_be_empty=False)
        self._limits = Limits() if limits is None else limits
        if not isinstance(self._limits, Limits):
            raise ConfigError(f"limits must be a kvlink.Limits, not {type(limits).__name__}")
        self._lanes = check_lanes(lanes)
        settings = NodeSettings(
            name=self._name,
            listen=listen,
            advertise=advertise,
            secrets=secrets_of(secret),
            lanes=self._lanes,
            copy_threads=_copy_threads(copy_threads),
            limits=self._limits,
            converts=check_conversions(convert),
        )
        self._running = Running(cache, settings)
        self._close_once = weakref.finalize(self, self._running.close, _EXIT_DEADLINE_S)

    def __repr__(self) -> str:
        """Name the node and where it listens."""
        return f"<kvlink.Node {self._name} at {self.address}{', closed' if self.closed else ''}>"

    def __enter__(self) -> Node:
        """Return the node, to be closed at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the node."""
        self.close()

    @property
    def name(self) -> str:
        """What peers and messages call this node."""
        return self._name

    @property
    def address(self) -> str:
        """``host:port`` that tickets name."""
        return self._running.address

    @property
    def epoch(self) -> str:
        """The node's present life, in hexadecimal: another one after every start and every ``resume``."""
        return self._running.life.epoch.hex()

    @property
    def limits(self) -> Limits:
        """Its bounds on time, memory and peers."""
        return self._limits

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._running.closed

    @property
    def state(self) -> str:
        """``"ready"``, or why not: ``"quarantined"``, ``"draining"``, ``"suspended"`` or ``"closed"``.

        A quarantined node takes no new pulls since more blocks than ``limits.quarantined_blocks``
        may still be written by pulls that have ended. Offers it takes, and it is ready again by
        itself once transfers drain.
        """
        return self._running.state

    @property
    def cache(self) -> KVCache:
        """The cache, with its regions as peers see them. Raises ``NotReady`` while suspended."""
        return self._running.life.cache

    @property
    def descriptor(self) -> dict[str, Any]:
        """What a ``TicketMint`` needs of this node: JSON-safe; for as long as the node is in this life.

        Holds no key, no memory address and no layout. A fresh copy.
        """
        return self._running.life.descriptor.as_dict()

    def offer(
        self,
        blocks: Blocks,
        *,
        num_tokens: int | None = None,
        ttl_s: float | None = None,
        retry_s: float | None = None,
        label: str = "",
        readers: int | None = None,
        payload: bytes | bytearray | memoryview = b"",
        ticket: Mapping[str, Any] | None = None,
        integrity: str | None = None,
    ) -> Offer:
        """Let `readers` other nodes read the blocks of `num_tokens` tokens. Does not block.

        `blocks` is a list, an int32 array, or one of these for each group by its name; ``-1`` is a
        hole that nobody may ask for. The bytes must stay as they are until the offer is released,
        which is at the last reader's confirmation or after `ttl_s` seconds (30, and one reader).

        `ticket` is one that a ``TicketMint`` made over this node and maybe others. It says how many
        tokens, readers and seconds; whoever had it early may have claimed it already.

        `retry_s` is how long it waits for another attempt once its reader is gone; by default `ttl_s`.

        `integrity` is the checksum by which readers check what they have read; by default the
        node's. A reader whose own node demands one gets that one.

        Raises
        ------
        InvalidArgument
            If a table is malformed or too short, a block is out of range or appears twice, another
            argument is out of bounds, or `ticket` says something else or does not name this node.
        TicketInvalid, StalePeer
            If `ticket` is not one, was altered, or names this node in another life.
        BlocksBusy
            If a pull is writing one of the blocks.
        Busy
            If there are as many live handoffs as the limits allow.
        NotReady
            If the node is being drained, or is suspended.
        Closed
            If the node is closed, or this is a forked child.
        """
        life = self._usable("offer").life
        terms = OfferTerms.of(ticket, life.source, num_tokens=num_tokens, readers=readers, ttl_s=ttl_s)
        handoff = life.engine.offer(
            blocks=block_tables(blocks, life.groups, num_tokens=terms.num_tokens, operation="offer"),
            num_tokens=terms.num_tokens,
            ttl_ms=terms.ttl_ms,
            retry_ms=None if retry_s is None else check_milliseconds(retry_s, called="offer: retry_s"),
            readers=terms.readers,
            payload=check_payload(payload, most_bytes=self._limits.payload_bytes, called="offer: payload"),
            label=check_text(label, called="offer: label", may_be_empty=True),
            integrity=check_integrity(integrity, called="offer: integrity") or self._integrity,
            minted=terms.minted,
        )
        made = terms.ticket or _own_ticket(life, handoff.sequence, terms)
        title = f"offer {handoff.epoch.hex()}-{handoff.sequence} of {self._name}"
        return Offer(handoff, self, title=title, lasts_s=terms.ttl_ms / 1000, ticket=made)

    def pull(
        self,
        ticket: Mapping[str, Any],
        blocks: Blocks,
        *,
        skip_tokens: int = 0,
        deadline_s: float = 10.0,
        require: str | None = None,
        label: str = "",
        ranks: int = 1,
    ) -> Pull:
        """Read an offer into `blocks`. Does not block: connecting, if need be, is done meanwhile.

        `blocks` covers the request from its first token. Blocks that lie within `skip_tokens`, a prefix that is
        here already, are left alone; so are holes, given as ``-1``. Slots of state are read whatever `skip_tokens`
        says, unless they are holes. `require` names the one lane to use. The outcome comes within `deadline_s`.

        A ticket over several sources is read from all of them: each element of this cache from one that holds it, and
        nothing from those that are not needed, which are told so. Success means that all have confirmed; the first
        that fails, fails the pull. `ranks` nodes that pull one ticket, such as all ranks of an engine, are one of
        its readers together; each says how many they are.

        Raises
        ------
        TicketInvalid, InvalidArgument
            If the ticket is not one, or was altered; as in ``offer``.
        BlocksBusy
            If another pull writes one of the blocks, or a live offer holds it.
        LaneUnavailable
            If this node may not use the lane that is required.
        NotOffered
            If the offer lacks a group of this cache.
        Busy
            If there are as many handoffs or unconnected peers as the limits allow.
        NotReady, Closed
            As in ``offer``; also if too many blocks are in quarantine.
        """
        life = self._usable("pull").life
        parsed = parse_ticket(ticket)
        operation = f"pull {parsed.title}"
        skip_tokens = check_count(skip_tokens, low=0, high=parsed.num_tokens, called=f"{operation}: skip_tokens")
        deadline_s = check_seconds(deadline_s, called=f"{operation}: deadline_s")
        label = check_text(label, called=f"{operation}: label", may_be_empty=True)
        ranks = check_count(ranks, low=1, high=MOST_READERS, called=f"{operation}: ranks")
        lane = self._lane(require, operation)
        parsed.check_has({group.name for group in life.groups}, operation)
        tables = block_tables(blocks, life.groups, num_tokens=parsed.num_tokens, operation=operation)
        contacts = life.dialer.contacts_for(parsed.sources, deadline_s=deadline_s)
        handoff = life.engine.pull(
            [(contact.peer, parsed.epoch_bytes, parsed.sequence) for contact in contacts],
            blocks=tables,
            num_tokens=parsed.num_tokens,
            skip_tokens=skip_tokens,
            deadline_ms=check_milliseconds(deadline_s, called=f"{operation}: deadline_s"),
            lane=lane,
            integrity=self._integrity,
            ranks=ranks,
            label=label,
        )
        return Pull(handoff, self, title=operation, lasts_s=deadline_s, contacts=contacts)

    def peers(self) -> list[dict[str, Any]]:
        """Return how each peer stands: name, address, role, state, lanes, transports, handoffs and bytes.

        ``bytes_per_s`` is measured: bytes over the time in which any moved, over the last seconds of
        moving; 0 before the first. A source of bytes only sees when it granted them and when they
        were confirmed, so what it says about its readers is lower, most of all for small handoffs.
        ``lane_reason`` says why ``lanes`` come in this order, and ``given_up`` why one that was opened is
        not among them; both are empty for a peer that reads from here. ``converts`` lists what becomes
        of the source's dtypes, where that is another one. A suspended node has no peers.
        """
        life = self._usable("peers").life
        try:
            peers = life.engine.peers()
        except NotReady:
            return []
        about = life.dialer.about
        return [{**peer, "epoch": peer["epoch"].hex(), **about(peer["peer"])} for peer in peers]

    def holds(self) -> dict[str, int]:
        """Return how many blocks are held, and how many handoffs live.

        "shared" by live offers, "exclusive" by live pulls, "quarantined" by pulls that have ended
        while something may still write the blocks. None counts twice, and "handoffs" are those
        without an outcome.
        """
        return dict(self._usable("holds").life.engine.holds())

    def counters(self) -> dict[str, int]:
        """Return what was counted since the start; ``connections: <result>`` counts accepted connections."""
        running = self._usable("counters")
        accepted = {f"connections: {result}": count for result, count in running.acceptor.counts().items()}
        return {**running.counters(), **accepted}

    def drop_peer(self, name: str) -> None:
        """Fail everything that is under way with the peers called `name`, and disconnect them.

        They may connect again. A name that nobody has is no error: that peer is gone already.
        """
        life = self._usable("drop_peer").life
        life.dialer.drop(name)
        for peer in self.peers():
            if peer["name"] == name and peer["state"] != "lost":
                life.engine.fail_peer(peer["peer"], code="PeerLost", message=f"{self._name} dropped the peer {name}")

    def rotate_secret(self, secret: Secret | Sequence[Secret]) -> None:
        """Use `secret`, or two of them, for connections that are made from now on; existing ones live on.

        A fleet changes its secret with no failed handoff in three rounds, each over all nodes in any
        order: ``[old, new]``, then ``[new, old]``, then ``new``. Whoever should be cut off at once is
        dropped by ``drop_peer`` after that.

        Raises
        ------
        ConfigError
            If `secret` is not one, or two. A node cannot lose its secret.
        Closed
            If the node is closed, or this is a forked child.
        """
        running = self._usable("rotate_secret")
        if secret is None:
            raise ConfigError("rotate_secret: a secret is needed; a node without one is made by secret=None")
        running.keyring.rotate(secrets_of(secret))

    def drain(self, *, deadline_s: float) -> None:
        """Take nothing new, and wait until what is under way has ended. Idempotent, from any thread.

        ``offer`` and ``pull`` raise ``NotReady`` from now on, and so do the pulls of peers whose
        offers are not here, so that a router can go elsewhere. Offers that live may still be
        claimed and read, by peers that have to connect first too: their prefill is done.
        ``resume()`` takes new work again.

        Raises
        ------
        DeadlineExceeded
            If something lives still after `deadline_s` seconds; the message says how much. The node
            goes on draining.
        Closed
            If the node is closed, also meanwhile, or this is a forked child.
        """
        self._usable("drain").drain(check_seconds(deadline_s, called="drain: deadline_s", may_be_zero=True))

    def suspend(self, *, deadline_s: float) -> None:
        """Let go of the cache's memory for a while, as for sleep mode or new weights. Idempotent.

        Waits at most `deadline_s` seconds for what is under way, as ``drain`` does, then fails what
        is left with ``NotReady``, on both sides. When this returns, nothing of this process touches
        the memory and nothing of it is registered; all connections have ended, and peers unmap what
        they have mapped when they see that. Name, address and ``fileno`` stay. Until ``resume``,
        ``offer`` and ``pull`` raise ``NotReady``, and peers that ask are told the same.

        Raises
        ------
        Closed
            If the node is closed, also meanwhile, or this is a forked child.
        """
        self._usable("suspend").suspend(check_seconds(deadline_s, called="suspend: deadline_s", may_be_zero=True))

    def resume(self, cache: KVCache | None = None) -> None:
        """Take work again after ``suspend``, over `cache`, or after ``drain``. Idempotent.

        `cache` may have any layout and lie anywhere. The node has a new epoch: tickets and
        descriptors of before are refused with ``StalePeer``, and peers connect anew with their next
        pull. If it fails, the node stays suspended.

        Raises
        ------
        InvalidArgument
            If the node is suspended and there is no cache, or it is not and has another cache.
        UnsupportedMemory, OutOfMemory, UcxUnavailable, TransportFailed
            As when a node is made.
        Closed
            If the node is closed, or this is a forked child.
        """
        if cache is not None:
            _check_cache(cache, "resume")
        self._usable("resume").resume(cache)

    def close(self, *, deadline_s: float | None = None) -> None:
        """Fail what is under way with ``Closed``, tell the peers, and end all threads.

        Waits at most `deadline_s` seconds, by default ``limits.close_deadline_s``. Idempotent, from
        any thread, also while other threads use the node or wait on its handles. In a forked child
        it does nothing.
        """
        self._running.close(deadline_s)
        self._close_once.detach()

    def check_usable(self, operation: str, *, closed_too: bool = True) -> None:
        """Raise ``Closed`` in a forked child and, where `closed_too`, after ``close``."""
        self._running.check_usable(operation, closed_too=closed_too)

    async def until_event(self, happened: Callable[[], bool]) -> None:
        """Wait in an asyncio loop until `happened` is true, asking after every event of any handle.

        `happened` must be cheap and thread-safe, and stay true once it is.
        """
        self.check_usable("await", closed_too=False)
        await self._running.awaiters.until(happened)

    def _usable(self, operation: str) -> Running:
        self._running.check_usable(f"{operation} at {self._name}")
        return self._running

    def _lane(self, require: str | None, operation: str) -> str:
        if require is None:
            return ""
        if require not in LANES:
            raise InvalidArgument(f"{operation}: no lane is called {require!r}; choose from {', '.join(LANES)}")
        if require not in self._lanes:
            raise LaneUnavailable(f"{operation}: lane {require!r} is not among lanes={list(self._lanes)} of this node")
        return require


def _check_cache(cache: object, operation: str) -> None:
    if not hasattr(cache, "within_allocations"):
        raise InvalidArgument(f"{operation}: cache must be a kvlink.KVCache, not {type(cache).__name__}")


def _own_ticket(life: Life, sequence: int, terms: OfferTerms) -> dict[str, Any]:
    return make_ticket(
        epoch=life.epoch,
        sequence=sequence,
        sources=[life.source],
        num_tokens=terms.num_tokens,
        groups=[group.name for group in life.groups],
        readers=terms.readers,
        ttl_ms=terms.ttl_ms,
    )


def _copy_threads(given: int | None) -> int:
    if given is not None:
        return check_count(given, low=1, high=_MOST_COPY_THREADS, called="node: copy_threads")
    from kvlink.transport import default_copy_threads

    return min(default_copy_threads(), _MOST_COPY_THREADS)
