"""Having the node that has reserved connect here, since it is always the reader of bytes who connects."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from contextlib import suppress

from kvlink.config import Limits
from kvlink.errors import Busy, Closed, DeadlineExceeded, KvlinkError, NotReady, OutOfMemory, PeerUnreachable
from kvlink.handoff.answer import Question
from kvlink.handoff.ask import Asker
from kvlink.handoff.claimants import Claimants
from kvlink.handoff.deadline import Deadline
from kvlink.handoff.dial import Dialer, allowed_to_connect
from kvlink.handoff.native import NativePush
from kvlink.handoff.ticket import TicketSource

__all__ = ["CALL_BACK", "Caller", "answer_call"]

_log = logging.getLogger("kvlink")

CALL_BACK = "call_back"
"""The question: connect here, as one who reads everything. The answer: the digest of the share."""

# The other side's word that it is connected comes a moment before or after the connection itself. One
# that it believes in and that is gone here is made anew once it has noticed: it is asked again, less and less often.
_ASK_AGAIN_S = 0.02
_MOST_ASK_AGAIN_S = 0.5
_DIGESTS_KEPT = 1024


class _Calling:
    """One node that is asked to connect, and the pushes that wait for it."""

    def __init__(self, target: TicketSource, deadline: Deadline) -> None:
        self.target = target
        self.deadline = deadline
        self.waiting: list[NativePush] = []
        self.thread: threading.Thread | None = None


class Caller:
    """Finds the connection for each push, or has it made. Thread-safe; for one life of a node."""

    def __init__(self, asker: Asker, claimants: Claimants, *, name: str, limits: Limits) -> None:
        self._asker = asker
        self._claimants = claimants
        self._name = name
        self._limits = limits
        self._lock = threading.RLock()
        self._digests: OrderedDict[bytes, bytes] = OrderedDict()  # of what each target takes from here, by its epoch
        self._callings: dict[bytes, _Calling] = {}
        self._closed: KvlinkError | None = None

    def start(self, push: NativePush, target: TicketSource, *, deadline_s: float) -> None:
        """Start `push` to `target` as soon as that is connected; fail it if it cannot be. Does not wait.

        Cancels it before it raises.

        Raises
        ------
        Busy
            If too many nodes are being called.
        Closed, NotReady
            If the node is closed, or suspended.
        OutOfMemory
            If there is no thread to call on.
        """
        try:
            self._start(push, target, allowed_s=allowed_to_connect(deadline_s))
        except BaseException:
            push.cancel()
            raise

    def _start(self, push: NativePush, target: TicketSource, *, allowed_s: float) -> None:
        epoch = target.epoch_bytes
        with self._lock:
            if self._closed is not None:
                raise type(self._closed)(f"push: {self._closed}")
            digest = self._digests.get(epoch)
            peer = None if digest is None else self._claimants.find(epoch, digest)
            if peer is not None:
                push.start(peer)
                return
            calling = self._callings.get(epoch)
            if calling is not None:
                calling.deadline.extend(allowed_s)
                calling.waiting.append(push)
                return
            if len(self._callings) >= self._limits.pending_connects:
                raise Busy(
                    f"push to {target.name} ({target.address}): {len(self._callings)} nodes are being called already, "
                    "the most that limits.pending_connects allows; try again"
                )
            calling = _Calling(target, Deadline(allowed_s, most_s=self._limits.connect_timeout_s))
            calling.waiting.append(push)
            calling.thread = threading.Thread(target=self._run, args=(calling,), name="kvlink-call", daemon=True)
            try:
                calling.thread.start()
            except RuntimeError as error:  # the operating system's limit on threads
                raise OutOfMemory(f"push to {target.name}: {error}") from None
            self._callings[epoch] = calling

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
        target, epoch = calling.target, calling.target.epoch_bytes
        peer = 0
        failure: KvlinkError | None = None
        try:
            digest, peer = self._call(calling)
            with self._lock:
                self._digests[epoch] = digest
                self._digests.move_to_end(epoch)
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
            self._callings.pop(epoch, None)
            waiting = list(calling.waiting)
        message = f"connect to {target.name} ({target.address}): {failure}"
        for push in waiting:
            with suppress(Closed, NotReady):  # Closing has failed them already.
                if failure is None:
                    push.start(peer)
                else:
                    push.fail(code=type(failure).__name__, message=message)

    def _call(self, calling: _Calling) -> tuple[bytes, int]:
        target, epoch = calling.target, calling.target.epoch_bytes
        patience_s = _ASK_AGAIN_S
        while True:
            calling.deadline.slice_s()
            remaining_s = calling.deadline.remaining_s
            digest = self._asker.ask(target.address, CALL_BACK, b"", deadline_s=remaining_s, epoch=epoch)
            peer = self._claimants.wait_for(epoch, digest, calling.deadline, most_s=patience_s)
            if peer is not None:
                return digest, peer
            patience_s = min(2 * patience_s, _MOST_ASK_AGAIN_S)


def answer_call(question: Question, dialer: Dialer) -> bytes:
    """Connect to whoever asks, as one who reads everything that this node's cache has; return the share's digest.

    Raises
    ------
    KvlinkError
        What keeps it from being connected.
    """
    source = TicketSource(name=question.name, address=question.address, epoch=question.epoch.hex())
    (contact,) = dialer.contacts_for([source], deadline_s=max(0.001, question.deadline.remaining_s))
    gathering = contact.gathering
    while gathering is not None and contact.gathering is gathering:
        gathering.join(timeout_s=question.deadline.slice_s())
    if contact.error is not None:
        raise contact.error
    if contact.key is None:
        raise PeerUnreachable(f"connecting back to {contact.title} has failed")
    return contact.key[1]
