"""What the scheduler half tells the worker halves at each step: plain data, which vLLM pickles."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Receive", "Send", "StepOrders", "WorkerFacts"]

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


@dataclass(frozen=True, slots=True)
class StepOrders:
    """All that is new in one step; `cancels` are ids of commands."""

    sends: list[Send] = field(default_factory=list)
    receives: list[Receive] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)


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
