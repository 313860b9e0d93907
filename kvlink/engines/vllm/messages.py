"""What the scheduler half tells the worker halves at each step: plain data, which vLLM pickles."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Expect", "Finish", "Progress", "Receive", "Reserve", "Send", "StepOrders", "WorkerFacts"]

Tables = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Offer the blocks of a finished prefill under `ticket`.

    Attributes
    ----------
    id
        Of the command, the same on all ranks.
    request_id
        As vLLM calls the request.
    tables
        One for each group of vLLM's configuration, in blocks of its scheduler.
    """

    id: str
    request_id: str
    ticket: dict[str, Any]
    tables: Tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Receive:
    """Pull what `ticket` offers.

    Attributes
    ----------
    tables
        As in ``Send``; empty where nothing is wanted but that prefill gives its blocks free.
    skip_tokens
        Tokens from the start that are here already.
    quiet
        vLLM does not wait for it, and must not hear of it.
    """

    id: str
    request_id: str
    ticket: dict[str, Any]
    num_tokens: int
    tables: Tables = ()
    skip_tokens: int = 0
    quiet: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Expect:
    """Push a prompt of `num_tokens` tokens to whoever announces a reservation for it under `key`.

    Attributes
    ----------
    id
        Of the push, which what follows names it by.
    """

    id: str
    request_id: str
    key: str
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Tokens from `first_token` to `end_token` of a prompt that is pushed are computed in this step, into `tables`."""

    id: str
    tables: Tables
    first_token: int
    end_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """A prompt that is pushed is computed, or, if not `complete`, never will be.

    With `report`, vLLM keeps its blocks until it is told that they are free.
    """

    id: str
    complete: bool
    report: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """Hold blocks to be pushed into, and tell so under `key` at `address`, the first rank of the prefill engine.

    `tables` and `quiet` are as in ``Receive``.
    """

    id: str
    request_id: str
    tables: Tables
    num_tokens: int
    skip_tokens: int
    key: str
    address: str
    quiet: bool = False


@dataclass(frozen=True, slots=True)
class StepOrders:
    """All that is new in one step; `cancels` are ids of commands."""

    sends: list[Send] = field(default_factory=list)
    receives: list[Receive] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    expects: list[Expect] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)
    finishes: list[Finish] = field(default_factory=list)
    reserves: list[Reserve] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """What a worker tells the scheduler half about itself, once.

    Attributes
    ----------
    descriptor
        Of its node.
    whole_blocks
        Its blocks are packed so that tokens cannot be told apart: they move whole.
    """

    descriptor: dict[str, Any]
    whole_blocks: bool
