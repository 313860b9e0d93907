"""What a scheduler says of a handoff once it is over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvlink.errors import KvlinkError

__all__ = ["HandOffReport", "Tried"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A worker that a request did not get to, and why."""

    worker: str
    seconds: float
    error: KvlinkError


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOffReport:
    """How one handoff went.

    Attributes
    ----------
    worker
        Who has it.
    handoff
        Its id, as peers and logs have it.
    seconds, phases_s
        How long it took in all, and the phases of the try that succeeded.
    skipped_tokens
        Tokens from the start that the worker had already, and that were not moved.
    reply
        What a ``DecodeWorker``'s ``hand_off`` returned.
    tried
        Workers of the directory that were tried before.
    """

    worker: str
    handoff: str
    seconds: float
    phases_s: Mapping[str, float]
    skipped_tokens: int = 0
    reply: Any = None
    tried: tuple[Tried, ...] = ()
