"""Having the node that has reserved connect here, since it is always the reader of bytes who connects."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

import msgspec

from kvlink.config import Limits
from kvlink.errors import (
    Busy,
    Closed,
    DeadlineExceeded,
    KvlinkError,
    NotReady,
    OutOfMemory,
    PeerUnreachable,
    ProtocolError,
)
from kvlink.handoff.address import split_address
from kvlink.handoff.answer import Question
from kvlink.handoff.ask import Asker
from kvlink.handoff.claimants import Claimants
from kvlink.handoff.deadline import Deadline
from kvlink.handoff.dial import Dialer, allowed_to_connect
from kvlink.handoff.native import NativePush
from kvlink.handoff.ticket import MOST_SOURCES, TicketSource

__all__ = ["CALL_BACK", "Call", "Caller", "answer_call"]

_log = logging.getLogger("kvlink")

CALL_BACK = "call_back"
"""The question: connect here. The answer: the digest of the share that will be read.

The body is empty for one who delivers everything; else it has the sources that deliver together, the asker among them.
"""

# The other side's word that it is connected comes a moment before or after the connection itself. One
# that it believes in and that is gone here is made anew once it has noticed: it is asked again, less and less often.
_ASK_AGAIN_S = 0.02
_MOST_ASK_AGAIN_S = 0.5
_DIGESTS_KEPT = 1024


_Sources = Annotated[list[TicketSource], msgspec.Meta(min_length=1, max_length=MOST_SOURCES)]
_Key = tuple[bytes, tuple[bytes, ...]]
"""Epoch of a target, and of the sources that deliver to it together; none for one that delivers everything."""


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """One push, and why its target could not be connected, if so."""

    push: NativePush
    error: KvlinkError | None = None


class _Calling:
    """One node that is asked to connect, and the pushes that wait for it."""

    def __init__(self, key: _Key, target: TicketSource, body: bytes, deadline: Deadline) -> None:
        self.key = key
        self.target = target
        self.body = body
        self.deadline = deadline
        self.waiting: list[Call] = []
        self.thread: threading.Thread | None = None


class Caller:
    """Finds the connection for each push, or has it made. Thread-safe; for one life of a node."""

    def __init__(self, asker: Asker, claimants: Claimants, *, name: str, limits: Limits) -> None:
        self._asker = asker
        self._claimants = claimants
        self._name = name
        self._limits = limits
        self._lock = threading.RLock()
        self._digests: OrderedDict[_Key, bytes] = OrderedDict()  # of what each target takes from here
        self._callings: dict[_Key, _Calling] = {}
        self._closed: KvlinkError | None = None

    def start(
        self, push: NativePush, target: TicketSource, *, sources: Sequence[TicketSource], deadline_s: float
    ) -> Call:
        """Start `push` to `target` as soon as that is connected; fail it if it cannot be. Does not wait.

        `sources` are those that the reservation names. Cancels the push before it raises.

        Raises
        ------
        Busy
            If too many nodes are being called.
        Closed, NotReady
            If the node is closed, or suspended.
        OutOfMemory
            If there is no thread to call on.
        """
        call = Call(push=push)
        try:
            self._start(call, target, sources if len(sources) > 1 else (), allowed_s=allowed_to_connect(deadline_s))
        except BaseException:
            push.cancel()
            raise
        return call

    def _start(self, call: Call, target: TicketSource, sources: Sequence[TicketSource], *, allowed_s: float) -> None:
        epoch = target.epoch_bytes
        key = (epoch, tuple(source.epoch_bytes for source in sources))
        with self._lock:
            if self._closed is not None:
                raise type(self._closed)(f"push: {self._closed}")
            digest = self._digests.get(key)
            peer = None if digest is None else self._claimants.find(epoch, digest)
            if peer is not None:
                call.push.start(peer)
                return
            calling = self._callings.get(key)
            if calling is not None:
                calling.deadline.extend(allowed_s)
                calling.waiting.append(call)
                return
            if len(self._callings) >= self._limits.pending_connects:
                raise Busy(
                    f"push to {target.name} ({target.address}): {len(self._callings)} nodes are being called already, "
                    "the most that limits.pending_connects allows; try again"
                )
            body = msgspec.msgpack.encode(list(sources)) if sources else b""
            calling = _Calling(key, target, body, Deadline(allowed_s, most_s=self._limits.connect_timeout_s))
            calling.waiting.append(call)
            calling.thread = threading.Thread(target=self._run, args=(calling,), name="kvlink-call", daemon=True)
            try:
                calling.thread.start()
            except RuntimeError as error:  # the operating system's limit on threads
                raise OutOfMemory(f"push to {target.name}: {error}") from None
            self._callings[key] = calling

    def close(self, why: KvlinkError, *, deadline_s: float) -> None:
        """Call off all calling and wait for the threads. Idempotent."""
        with self._lock:
            self._closed = self._closed or why
            callings = list(self._callings.values())
        deadline = Deadline(deadline_s)
        for calling in callings:
            calling.deadline.call_off()
        for calling in callings:
            if calling.thread is not None and calling.thread is not threading.current_thread():
                calling.thread.join(timeout=max(0.0, deadline.remaining_s))

    def _run(self, calling: _Calling) -> None:
        """Top of a calling thread: whatever happens, the waiting pushes are told."""
        target = calling.target
        peer = 0
        failure: KvlinkError | None = None
        try:
            digest, peer = self._call(calling)
            with self._lock:
                self._digests[calling.key] = digest
                self._digests.move_to_end(calling.key)
                while len(self._digests) > _DIGESTS_KEPT:
                    self._digests.popitem(last=False)
        except DeadlineExceeded:
            failure = PeerUnreachable("it did not connect in time; can it reach this node's address?")
        except KvlinkError as error:
            failure = self._closed or error
        except Exception as error:  # noqa: BLE001 - the top of a thread
            _log.exception("calling %s failed inside kvlink", target.name)
            failure = PeerUnreachable(f"{type(error).__name__}: {error}")
        with self._lock:
            self._callings.pop(calling.key, None)
            waiting = list(calling.waiting)
        message = f"connect to {target.name} ({target.address}): {failure}"
        for call in waiting:
            call.error = failure
            with suppress(Closed, NotReady):  # Closing has failed them already.
                if failure is None:
                    call.push.start(peer)
                else:
                    call.push.fail(code=type(failure).__name__, message=message)

    def _call(self, calling: _Calling) -> tuple[bytes, int]:
        target, epoch = calling.target, calling.target.epoch_bytes
        patience_s = _ASK_AGAIN_S
        while True:
            calling.deadline.slice_s()
            remaining_s = calling.deadline.remaining_s
            digest = self._asker.ask(target.address, CALL_BACK, calling.body, deadline_s=remaining_s, epoch=epoch)
            peer = self._claimants.wait_for(epoch, digest, calling.deadline, most_s=patience_s)
            if peer is not None:
                return digest, peer
            patience_s = min(2 * patience_s, _MOST_ASK_AGAIN_S)


def answer_call(question: Question, dialer: Dialer) -> bytes:
    """Connect to whoever asks, as one who reads what that delivers; return the share's digest.

    Raises
    ------
    KvlinkError
        What keeps it from being connected.
    """
    sources = _sources_of(question)
    contacts = dialer.contacts_for(sources, deadline_s=max(0.001, question.deadline.remaining_s))
    contact = next(one for one in contacts if one.source.epoch_bytes == question.epoch)
    gathering = contact.gathering
    while gathering is not None and contact.gathering is gathering:
        gathering.join(timeout_s=question.deadline.slice_s())
    if contact.error is not None:
        raise contact.error
    if contact.key is None:
        raise PeerUnreachable(f"connecting back to {contact.title} has failed")
    return contact.key[1]


def _sources_of(question: Question) -> list[TicketSource]:
    """Return who delivers together with whoever asks."""
    asker = TicketSource(name=question.name, address=question.address, epoch=question.epoch.hex())
    if not question.body:
        return [asker]
    try:
        sources: list[TicketSource] = msgspec.msgpack.decode(question.body, type=_Sources)
        for source in sources:
            split_address(source.address)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise ProtocolError(f"{question.name} asks to be called back for something else: {error}") from None
    epochs = {source.epoch for source in sources}
    if asker.epoch not in epochs or len(epochs) != len(sources):
        raise ProtocolError(f"{question.name} asks to be called back among sources that it is none of, or one is twice")
    return sources
