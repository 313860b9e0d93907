"""Who waits for which command: each request is told of once, with failures, after its blocks were let go.

vLLM's engine dies of a request that is reported twice, or that it does not know; and its decode side leaks the blocks
of one that is never reported. So everything that the worker half reports comes from here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvlink.commands import Event
from kvlink.errors import KvlinkError

__all__ = ["Ended", "Ledger", "Report"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    request_id: str
    sends: bool
    quiet: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A command that is over: its blocks are free. Everything but the release is in `outcome`."""

    id: str
    request_id: str
    sends: bool
    quiet: bool
    outcome: Event | None

    @property
    def error(self) -> KvlinkError | None:
        """Why it failed; ``None`` after success."""
        return None if self.outcome is None else self.outcome.error


@dataclass(slots=True)
class Report:
    """What vLLM is told after one step.

    Attributes
    ----------
    sent, received
        Requests whose blocks are free on this side, or filled. Failed ones are received, too.
    failed
        Those of `received` whose bytes did not come.
    ended
        All commands that are over, also those of which vLLM is not told.
    """

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    ended: list[Ended] = field(default_factory=list)


class Ledger:
    """What was submitted for which request, until its blocks were let go. Belongs to the worker's one thread."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._outcomes: dict[str, Event] = {}
        self._held_back: set[str] = set()  # requests that are sent, and were received in the same step

    def __len__(self) -> int:
        """Return how many commands are under way."""
        return len(self._entries)

    def expect(self, command_id: str, request_id: str, *, sends: bool, quiet: bool = False) -> None:
        """Remember that events of `command_id` are about `request_id`; `quiet`: vLLM does not wait for them."""
        assert command_id not in self._entries, "a command is submitted once"
        self._entries[command_id] = _Entry(request_id=request_id, sends=sends, quiet=quiet)

    def take(self, events: Iterable[Event]) -> Report:
        """Return what `events` amount to. Events of unknown commands are of nobody's concern, and left out."""
        report = Report(sent=self._held_back)
        self._held_back = set()
        for event in events:
            if event.id not in self._entries:
                continue
            if event.kind == "outcome":
                self._outcomes[event.id] = event
                continue
            entry = self._entries.pop(event.id)
            ended = Ended(
                id=event.id,
                request_id=entry.request_id,
                sends=entry.sends,
                quiet=entry.quiet,
                outcome=self._outcomes.pop(event.id, None),
            )
            report.ended.append(ended)
            if entry.quiet:
                continue
            (report.sent if entry.sends else report.received).add(entry.request_id)
            if not entry.sends and ended.error is not None:
                report.failed.add(entry.request_id)
        # vLLM frees a request's blocks for either, and must hear of the first before the second.
        self._held_back = report.sent & report.received
        report.sent -= self._held_back
        return report
