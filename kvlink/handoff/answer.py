"""Answering what peers ask: a thread for each of them, so that a slow answer holds up nobody else's.

A peer has proved the secret before it may ask, and is still bounded: in the size of a question, in
the time that one takes to come, and in how many may ask at once (``limits.ask_sessions``).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvlink import wire
from kvlink.config import Limits
from kvlink.errors import Busy, Closed, KvlinkError, LayoutMismatch, PeerLost, ProtocolError, TransportFailed
from kvlink.handoff import handshake
from kvlink.handoff.deadline import Deadline
from kvlink.handoff.framed_socket import FramedSocket

__all__ = ["Answerer", "Question"]

_log = logging.getLogger("kvlink")

# An asker lets its connection go after half of this, so that neither side ends one that is in use.
IDLE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a peer wants to know.

    Attributes
    ----------
    name, address, epoch
        Who asks, and where that node listens.
    body
        As the kind of question has it.
    deadline
        How long the asker waits; called off when this node closes.
    """

    name: str
    address: str
    epoch: bytes
    body: bytes
    deadline: Deadline


Handler = Callable[[Question], bytes]
"""Returns the answer's body, or raises what the asker is to see. May wait, within the question's deadline."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Session:
    """One connection on which a peer asks one question after another."""

    link: FramedSocket
    thread: threading.Thread = field(default_factory=threading.current_thread)
    idle_since: float | None = None
    deadline: Deadline | None = None
    is_ending: bool = False

    def end(self) -> None:
        """End it soon, from any thread; its own thread closes the socket."""
        self.is_ending = True
        if self.deadline is not None:
            self.deadline.call_off()
        self.link.abort()


class Answerer:
    """Knows who answers which kind of question, and runs the sessions of those who ask. Thread-safe."""

    def __init__(self, *, name: str, limits: Limits) -> None:
        self._name = name
        self._limits = limits
        self._lock = threading.RLock()
        self._handlers: dict[str, Handler] = {}
        self._sessions: set[_Session] = set()
        self._closed = False

    def register(self, kind: str, handler: Handler) -> None:
        """Let `handler` answer every question of `kind` from now on."""
        self._handlers[kind] = handler

    def serve(self, link: FramedSocket, asker: wire.IntroduceAsker) -> None:
        """Answer what `asker` asks on `link`, in the calling thread, until either side has had enough.

        Raises
        ------
        Busy
            If as many peers are asking as the limits allow.
        Closed
            If the node is closed.
        ProtocolError, DeadlineExceeded
            If the peer breaks the protocol, or takes too long to say what it wants.
        """
        session = self._enter(link)
        try:
            while link.wait_readable(timeout_s=IDLE_S):
                session.idle_since = None
                link.allow(Deadline(self._limits.handshake_timeout_s))
                answer = self._answer(session, asker, handshake.receive(link, wire.Ask))
                link.allow(Deadline(self._limits.handshake_timeout_s))
                handshake.send(link, answer)
                session.deadline = None
                session.idle_since = time.monotonic()
        except PeerLost:
            return  # It has asked what it wanted to, or this side has ended the session.
        finally:
            with self._lock:
                self._sessions.discard(session)

    def end_sessions(self, deadline: Deadline) -> None:
        """End all sessions; peers that ask again begin new ones."""
        with self._lock:
            sessions = list(self._sessions)
        for session in sessions:
            session.end()
        for session in sessions:
            if session.thread is not threading.current_thread():
                session.thread.join(timeout=max(0.0, deadline.remaining_s))

    def close(self, deadline: Deadline) -> None:
        """End all sessions, and refuse new ones. Idempotent."""
        self._closed = True
        self.end_sessions(deadline)
        self._handlers.clear()  # They may refer to whoever owns this object.

    def _enter(self, link: FramedSocket) -> _Session:
        session = _Session(link=link, idle_since=time.monotonic())
        with self._lock:
            if self._closed:
                raise Closed(f"the node {self._name} is closed")
            if len(self._sessions) >= self._limits.ask_sessions:
                idle = [one for one in self._sessions if one.idle_since is not None]
                if not idle:
                    raise Busy(f"{self._name} is being asked by {len(self._sessions)} peers already: try again")
                oldest = min(idle, key=lambda one: one.idle_since or 0.0)
                self._sessions.discard(oldest)
                oldest.end()
            self._sessions.add(session)
        return session

    def _answer(self, session: _Session, asker: wire.IntroduceAsker, ask: wire.Ask) -> wire.Answer:
        session.deadline = deadline = Deadline(ask.remaining_ms / 1000)
        question = Question(name=asker.name, address=asker.address, epoch=asker.epoch, body=ask.body, deadline=deadline)
        try:
            body = self._handler(session, ask.kind)(question)
        except KvlinkError as error:
            return _refusal(ask.number, error)
        except Exception as error:  # noqa: BLE001 - the top of a thread: one bad answer must not end the session
            _log.exception("answering %r failed inside kvlink", ask.kind)
            return _refusal(ask.number, TransportFailed(f"answering failed: {type(error).__name__}: {error}"))
        return wire.Answer(number=ask.number, body=body)

    def _handler(self, session: _Session, kind: str) -> Handler:
        if session.is_ending:
            raise Closed(f"the node {self._name} is closed or suspended")
        handler = self._handlers.get(kind)
        if handler is None:
            raise ProtocolError(f"{self._name} knows no question of kind {kind!r}: is it an older version?")
        return handler


def _refusal(number: int, error: KvlinkError) -> wire.Answer:
    mismatch = error if isinstance(error, LayoutMismatch) else LayoutMismatch()
    return wire.Answer(
        number=number,
        code=type(error).__name__,
        message=str(error)[:1024],
        field=str(mismatch.field)[:256],
        source_value=str(mismatch.source_value)[:256],
        target_value=str(mismatch.target_value)[:256],
    )
