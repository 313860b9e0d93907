"""The way of engines into a node: commands in batches, events when the engine looks for them, no waiting."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

from kvlink import commands as c
from kvlink.errors import Busy, FailedRange, InvalidArgument, KvlinkError, UnknownHandoff
from kvlink.handoff.arguments import check_count
from kvlink.handoff.handles import Handle
from kvlink.handoff.push import Push, Slot

if TYPE_CHECKING:
    from kvlink.handoff.native import NativeEngine
    from kvlink.handoff.node import Node
    from kvlink.handoff.running import Running

__all__ = ["Submissions", "Submitting"]

_MOST_EVENTS = 1 << 20
_HANDOFFS = (c.Offer, c.Pull, c.Reserve, c.Push)
_WITHOUT_EVENTS = (c.Add, c.Ready, c.Commit, c.Cancel)
# Of a handoff that the native core calls ended, which always has a result.
_UNENDED: tuple[Any, ...] = (("TransportFailed", "no cause was recorded"), (), 0, 0, "", {}, b"")


class _Submitted:
    """One command whose release was not taken yet."""

    __slots__ = ("cancelled", "error", "handle", "id", "tag", "token")

    def __init__(self, token: int, command_id: str, tag: Any) -> None:
        self.token = token
        self.id = command_id
        self.tag = tag
        self.handle: Handle | None = None  # none until it has started
        self.error: KvlinkError | None = None  # why it never did
        self.cancelled = False  # before it has started

    def event(self, *, released: bool) -> c.Event:
        if released:
            return c.Event(id=self.id, tag=self.tag, kind="released", handoff=self.handle.id if self.handle else "")
        if self.handle is None:
            return c.Event(id=self.id, tag=self.tag, kind="outcome", error=self.error)
        cause, failed, prefix, moved, lane, phases_s, payload = self.handle._handoff.ended or _UNENDED
        ranges = tuple(FailedRange(*one) for one in failed)
        return c.Event(
            id=self.id,
            tag=self.tag,
            kind="outcome",
            error=self.handle._explain(cause, ranges, prefix) if cause else None,
            failed=ranges,
            valid_prefix_tokens=prefix,
            bytes=moved,
            lane=lane,
            phases_s=phases_s,
            payload=payload,
            handoff=self.handle.id,
        )


class Submissions:
    """What was submitted to one node, until its events were taken. Thread-safe.

    Belongs to the node itself and not to what it runs: it keeps handles, and they keep the node.
    """

    def __init__(self, engine: NativeEngine, *, most: int) -> None:
        from kvlink import _native

        self._completions = _native.Completions(cast("_native.Engine", engine))
        self._most = most
        self._tokens = itertools.count(1)
        self._lock = threading.Lock()
        self._taking = threading.Lock()  # a release must not overtake its outcome
        self._by_token: dict[int, _Submitted] = {}
        self._by_id: dict[str, _Submitted] = {}

    def submit(self, node: Node, commands: Sequence[c.Command], tag: Any) -> dict[str, dict[str, Any]]:
        """Start each of `commands`; see ``Node.submit``."""
        tickets: dict[str, dict[str, Any]] = {}
        for command, submitted in zip(commands, self._enter(commands, tag), strict=True):
            if isinstance(command, c.Cancel):
                self._cancel(command.id)
            elif submitted is None:
                self._step(command, tag)
            else:
                handle = self._start(node, command, submitted)
                if isinstance(handle, Slot):
                    tickets[command.id] = handle.ticket
        return tickets

    def take(self, most: int) -> list[c.Event]:
        """Return the oldest events; see ``Node.completions``."""
        events = []
        with self._taking:
            for token, released in self._completions.take(most, resets_bell=True):
                submitted = self._by_token[token]
                events.append(submitted.event(released=released))
                if released:
                    with self._lock:
                        del self._by_token[token]
                        self._by_id.pop(submitted.id, None)  # a step of a push is in no other book
        return events

    def _enter(self, commands: Sequence[c.Command], tag: Any) -> list[_Submitted | None]:
        """Return an entry for each command that is to have events, or refuse all of them together."""
        entries: list[_Submitted | None] = []
        new: dict[str, _Submitted] = {}
        with self._lock:
            for command in commands:
                if isinstance(command, _WITHOUT_EVENTS):
                    entries.append(None)
                    continue
                if not isinstance(command, _HANDOFFS):
                    raise InvalidArgument(f"submit: {command!r:.80} is none of the commands of kvlink.commands")
                if command.id in self._by_id or command.id in new:
                    raise InvalidArgument(
                        f"submit: command {command.id} was submitted before: make a new one each time"
                    )
                new[command.id] = _Submitted(next(self._tokens), command.id, tag)
                entries.append(new[command.id])
            if len(self._by_token) + len(commands) > self._most:
                raise Busy(
                    f"submit: {len(self._by_token)} commands live or have events waiting: call completions first"
                )
            self._by_id.update(new)
            self._by_token.update((entry.token, entry) for entry in new.values())
        return entries

    def _start(self, node: Node, command: c.Command, submitted: _Submitted) -> Handle | None:
        try:
            handle = _started(node, command)
        except KvlinkError as error:
            submitted.error = error
            self._completions.add_ended(submitted.token)
            return None
        with self._lock:
            submitted.handle = handle
            cancelled = submitted.cancelled
        handle._handoff.report_to(self._completions, submitted.token)
        if cancelled:
            handle._handoff.cancel()
        return handle

    def _step(self, command: c.Command, tag: Any) -> None:
        """Do what is said of a push; tell it only if it is refused."""
        assert isinstance(command, c.Add | c.Ready | c.Commit)
        try:
            with self._lock:
                submitted = self._by_id.get(command.push)
            _take_step(submitted.handle if submitted is not None else None, command)
        except KvlinkError as error:
            refused = _Submitted(next(self._tokens), command.id, tag)
            refused.error = error
            with self._lock:
                self._by_token[refused.token] = refused
            self._completions.add_ended(refused.token)

    def _cancel(self, command_id: str) -> None:
        with self._lock:
            submitted = self._by_id.get(command_id)
            if submitted is None:
                return
            submitted.cancelled = True
            handle = submitted.handle
        if handle is not None:
            handle._handoff.cancel()


def _started(node: Node, command: c.Command) -> Handle:
    if isinstance(command, c.Offer):
        return node.offer(
            command.blocks,
            ticket=command.ticket,
            retry_s=command.retry_s,
            payload=command.payload,
            label=command.label,
            integrity=command.integrity,
        )
    if isinstance(command, c.Pull):
        return node.pull(
            command.ticket,
            command.blocks,
            skip_tokens=command.skip_tokens,
            deadline_s=command.deadline_s,
            require=command.require,
            label=command.label,
            ranks=command.ranks,
        )
    if isinstance(command, c.Reserve):
        return node.reserve(
            command.blocks,
            num_tokens=command.num_tokens,
            ttl_s=command.ttl_s,
            skip_tokens=command.skip_tokens,
            require=command.require,
            label=command.label,
            sources=command.sources,
        )
    assert isinstance(command, c.Push)
    return node.push(
        command.ticket,
        command.blocks,
        deadline_s=command.deadline_s,
        integrity=command.integrity,
        label=command.label,
    )


def _take_step(push: Handle | None, command: c.Add | c.Ready | c.Commit) -> None:
    if not isinstance(push, Push):
        raise UnknownHandoff(f"submit {type(command).__name__}: no push with id {command.push!r} is under way here")
    if isinstance(command, c.Add):
        push.add(command.blocks)
    elif isinstance(command, c.Commit):
        push.commit(payload=command.payload)
    else:
        end = push.num_tokens if command.end_token is None else command.end_token
        push.ready(layers=command.layers, tokens=range(command.first_token, end), fence=command.fence)


class Submitting:
    """The part of ``Node`` that engines use from their own loop. Nothing in it waits."""

    _running: Running
    _submissions: Submissions | None = None
    _submissions_lock = threading.Lock()

    def submit(self, commands: Iterable[c.Command], *, tag: Any = None) -> dict[str, dict[str, Any]]:
        """Start everything in `commands`, which ``kvlink.commands`` has. Never waits for a peer or a thread.

        Returns the tickets of what was reserved, by the id of its command.

        What is wrong with one command, or with the node at the moment, is the outcome of that
        command alone; the others go on. `tag` comes back with every event of this batch.

        Raises
        ------
        InvalidArgument
            If one is no command, or was submitted here before; then nothing was started.
        Busy
            If too many live or have events that nobody has taken; then nothing was started.
        Closed
            If the node is closed, or this is a forked child.
        """
        running = self._running
        running.check_usable("submit")
        return self._submitted(running).submit(cast("Node", self), list(commands), tag)

    def completions(self, max_events: int = 1024) -> list[c.Event]:
        """Return what has happened to submitted commands, at most `max_events`, oldest first. Never waits.

        Each event comes once, to one caller. ``fileno`` is readable while there are some; this
        reads it empty. Works after ``close`` too, for the last ones.

        Raises
        ------
        InvalidArgument
            If `max_events` is out of bounds.
        Closed
            In a forked child.
        """
        self._running.check_usable("completions", closed_too=False)
        most = check_count(max_events, low=1, high=_MOST_EVENTS, called="completions: max_events")
        return self._submissions.take(most) if self._submissions is not None else []

    def fileno(self) -> int:
        """Return an eventfd that is readable once something happened to any handle.

        ``completions`` reads it empty; who has handles only does so itself.
        """
        self._running.check_usable("fileno")
        return self._running.life.engine.fileno()

    def _submitted(self, running: Running) -> Submissions:
        if self._submissions is None:
            with self._submissions_lock:
                if self._submissions is None:
                    self._submissions = Submissions(running.life.engine, most=2 * running.max_handoffs)
        return self._submissions
