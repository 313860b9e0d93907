"""What an engine tells its node to do, and the events that come back.

For engines whose scheduler and workers are different processes: commands are plain data, made
where no node is, with nothing native in the process. msgspec encodes them, and tells them apart
again as a `Command`. ``Node.submit`` takes them in batches and never waits.
"""

from __future__ import annotations

import itertools
import os
from typing import Any, Literal

import msgspec

from kvlink.errors import FailedRange, KvlinkError

__all__ = ["Add", "Cancel", "Command", "Commit", "Event", "Offer", "Pull", "Push", "Ready", "Reserve"]


class _Ids:
    """Ids that no other process, and no fork of this one, gives out."""

    def __init__(self) -> None:
        self.renew()
        os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        self._process = os.urandom(8).hex()
        self._numbers = itertools.count(1)

    def fresh(self) -> str:
        return f"{self._process}-{next(self._numbers)}"


_ids = _Ids()


class Offer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Let others read `blocks`, as ``Node.offer`` does with a ticket of a ``TicketMint``.

    Attributes
    ----------
    id
        Made here, and unique. The same command may go to several ranks: each reports it by this id.
    """

    blocks: Any
    ticket: dict[str, Any]
    retry_s: float | None = None
    payload: bytes = b""
    label: str = ""
    integrity: str | None = None
    id: str = msgspec.field(default_factory=_ids.fresh)


class Pull(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Read an offer into `blocks`, as ``Node.pull`` does; the deadline counts from ``Node.submit``."""

    ticket: dict[str, Any]
    blocks: Any
    skip_tokens: int = 0
    deadline_s: float = 10.0
    require: str | None = None
    label: str = ""
    ranks: int = 1
    id: str = msgspec.field(default_factory=_ids.fresh)


class Reserve(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Hold `blocks` to be pushed into, as ``Node.reserve`` does; ``Node.submit`` returns the ticket.

    Attributes
    ----------
    sources
        Descriptors of the nodes that push together; empty: one node, whichever comes first.
    """

    blocks: Any
    num_tokens: int
    ttl_s: float = 30.0
    skip_tokens: int = 0
    require: str | None = None
    label: str = ""
    sources: list[dict[str, Any]] = []
    id: str = msgspec.field(default_factory=_ids.fresh)


class Push(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Bring `blocks` into what `ticket` reserves, as ``Node.push`` does; the deadline counts from ``Node.submit``.

    What follows names it by its `id`: ``Add``, ``Ready`` and, at last, ``Commit``.
    """

    ticket: dict[str, Any]
    blocks: Any
    deadline_s: float = 30.0
    integrity: str | None = None
    label: str = ""
    id: str = msgspec.field(default_factory=_ids.fresh)


class Add(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Add blocks to a push, as ``Push.add`` does.

    It has events of its own only if it is refused, as ``Ready`` and ``Commit`` have; the push goes on.

    Attributes
    ----------
    push
        The `id` of its ``Push``.
    """

    push: str
    blocks: Any
    id: str = msgspec.field(default_factory=_ids.fresh)


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Say that `layers`, or all, are computed for tokens from `first_token` to `end_token`, or all.

    `fence` is waited for first, on another thread, as in ``Push.ready``; it stays in its process.
    """

    push: str
    layers: list[str] | None = None
    first_token: int = 0
    end_token: int | None = None
    fence: Any = None
    id: str = msgspec.field(default_factory=_ids.fresh)


class Commit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Say that all of a push is computed, and send `payload` along, as ``Push.commit`` does."""

    push: str
    payload: bytes = b""
    id: str = msgspec.field(default_factory=_ids.fresh)


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Ask to end what was submitted with this id.

    Has no event of its own, and is harmless in every state: the events of `id` tell what came of it.
    """

    id: str


Command = Offer | Pull | Reserve | Push | Add | Ready | Commit | Cancel


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened to a submitted command. Each has an outcome, and a release later or right after.

    Attributes
    ----------
    id
        The command's.
    tag
        What ``Node.submit`` was given with it.
    kind
        ``"outcome"``: it has succeeded, or failed with `error`. ``"released"``: its blocks may be
        used for something else; the other fields then have their defaults.
    error
        Why it failed, ``None`` after success.
    failed
        What did not arrive of a pull, or in a reservation.
    valid_prefix_tokens
        Tokens from the start that may be used although it failed.
    bytes
        Bytes of KV cache moved.
    lane
        How they moved.
    phases_s
        Seconds spent in each phase.
    payload
        Small bytes that came with a pull, or into a reservation, that succeeded.
    handoff
        ``<epoch>-<sequence>`` of the handoff, as peers and logs have it; empty if it never started.
    """

    id: str
    tag: Any
    kind: Literal["outcome", "released"]
    error: KvlinkError | None = None
    failed: tuple[FailedRange, ...] = ()
    valid_prefix_tokens: int = 0
    bytes: int = 0
    lane: str = ""
    phases_s: dict[str, float] = {}
    payload: Any = b""
    handoff: str = ""
