"""Letting other nodes connect: one listening thread, and a short-lived thread for each handshake.

Dialers may be hostile. What one can do is bounded by the limits: a connection has
``handshake_timeout_s`` from its first byte to its last, a frame has a largest size, and there are
at most ``pending_handshakes`` of them. At that number the oldest which has proved nothing makes
room, since an honest dialer is through in milliseconds and one that dawdles is not.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from kvlink import wire
from kvlink.config import Limits
from kvlink.errors import AuthenticationFailed, KvlinkError, PeerLost
from kvlink.handoff import handshake
from kvlink.handoff.address import join_address
from kvlink.handoff.answer import Answerer
from kvlink.handoff.deadline import Deadline
from kvlink.handoff.framed_socket import FramedSocket
from kvlink.handoff.life import Life
from kvlink.handoff.pairing import digest_of, template_between
from kvlink.handoff.pool_socket import PoolSocket

__all__ = ["Acceptor"]

_log = logging.getLogger("kvlink")

# After `accept` failed for want of descriptors: the listener stays readable, so without a pause the
# thread would spin until somebody closes one.
_PAUSE_S = 0.1
# Closing wakes the thread through its socket; this is only the bound of a wait.
_LOOK_AGAIN_S = 60.0


@dataclass(slots=True, kw_only=True, eq=False)
class _Pending:
    """One accepted connection in its handshake."""

    link: FramedSocket
    address: str
    deadline: Deadline
    thread: threading.Thread | None = None
    proven: bool = False
    was_cut_off: bool = False

    def cut_off(self) -> None:
        """End it soon, from any thread; its own thread closes the socket."""
        self.was_cut_off = True
        self.deadline.call_off()
        self.link.abort()


class Acceptor:
    """Owns the listening sockets of a node. ``close`` ends it."""

    def __init__(
        self,
        life: Life,
        *,
        listener: socket.socket,
        pools: PoolSocket,
        keyring: handshake.Keyring,
        answerer: Answerer,
        limits: Limits,
    ) -> None:
        self._name = life.introduction.name
        self._served: Life | KvlinkError = life  # or why nobody is
        self._listener = listener
        self._pools = pools
        self._keyring = keyring
        self._answerer = answerer
        self._limits = limits
        self._lock = threading.RLock()
        self._pending: dict[_Pending, None] = {}  # in the order of their arrival
        self._counts: Counter[str] = Counter()
        self._warned = False
        self._closing = False
        self._wake_receiver, self._wake_sender = socket.socketpair()
        try:
            self._selector = selectors.DefaultSelector()
        except OSError:  # no descriptor is free
            self._wake_receiver.close()
            self._wake_sender.close()
            raise
        self._selector.register(listener, selectors.EVENT_READ, (listener, self._answer))
        self._selector.register(pools.listener, selectors.EVENT_READ, (pools.listener, self._serve_pools))
        self._selector.register(self._wake_receiver, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._listen, name="kvlink-accept", daemon=True)
        self._thread.start()

    def serve(self, life: Life) -> None:
        """Give connections to `life` from now on."""
        self._served = life

    def stop_serving(self, why: KvlinkError, *, deadline_s: float) -> None:
        """Tell authenticated dialers `why` they are refused from now on, and end the handshakes under way."""
        self._served = why
        with self._lock:
            pending = list(self._pending)
        deadline = Deadline(deadline_s)
        self._end(pending, deadline)
        self._answerer.end_sessions(deadline)

    def counts(self) -> dict[str, int]:
        """Return how many connections ended how: "accepted", "pools passed", "cut off", or an error's name."""
        with self._lock:
            return dict(self._counts)

    def close(self, *, deadline_s: float) -> None:
        """Stop listening, cut off all handshakes and wait for the threads. Idempotent."""
        deadline = Deadline(deadline_s)
        with self._lock:
            self._closing = True
            pending = list(self._pending)
        with contextlib.suppress(OSError):  # closed by the call before this one
            self._wake_sender.send(b"x")
        self._end(pending, deadline)
        self._answerer.close(deadline)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=max(0.0, deadline.remaining_s))
        self._listener.close()
        self._pools.close()
        # What the thread waits on goes last: it would not be woken any more. If there was no time to wait for it, it
        # does this by itself.
        if not self._thread.is_alive():
            self.close_sockets()

    def close_sockets(self) -> None:
        """Close what this object listens on; all that a forked child may do. Idempotent."""
        for one in (self._selector, self._listener, self._wake_receiver, self._wake_sender):
            one.close()
        self._pools.close()

    def _end(self, pending: list[_Pending], deadline: Deadline) -> None:
        for one in pending:
            one.cut_off()
        for one in pending:
            if one.thread is not None and one.thread is not threading.current_thread():
                with contextlib.suppress(RuntimeError):  # It has not started; it will find its connection cut off.
                    one.thread.join(timeout=max(0.0, deadline.remaining_s))

    def _listen(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(timeout=_LOOK_AGAIN_S):
                if key.data is not None:
                    self._accept_one(*key.data)
        self.close_sockets()

    def _accept_one(self, listener: socket.socket, serve: Callable[[_Pending], str]) -> None:
        try:
            connection, place = listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # It left again before this thread got to it.
        except OSError as error:
            if self._closing:
                return  # The listener was closed meanwhile.
            with self._lock:
                self._counts["out of descriptors"] += 1
            self._warn_once("accepting connections fails: %s; raise the limit on open files", error.strerror)
            threading.Event().wait(_PAUSE_S)
            return
        deadline = Deadline(self._limits.handshake_timeout_s)
        address = join_address(*place[:2]) if place else ""
        pending = _Pending(link=FramedSocket(connection, deadline), address=address, deadline=deadline)
        thread = threading.Thread(target=self._run, args=(pending, serve), name="kvlink-handshake", daemon=True)
        pending.thread = thread
        with self._lock:
            if self._closing:
                connection.close()
                return
            if len(self._pending) >= self._limits.pending_handshakes:
                self._make_room()
            self._pending[pending] = None
        try:
            thread.start()
        except RuntimeError:  # the operating system's limit on threads
            self._forget(pending, "out of threads")

    def _make_room(self) -> None:
        oldest = next((one for one in self._pending if not one.proven), next(iter(self._pending)))
        del self._pending[oldest]
        oldest.cut_off()

    def _run(self, pending: _Pending, serve: Callable[[_Pending], str]) -> None:
        """Top of a handshake's thread: whatever happens, the connection is closed and counted."""
        result = "internal error"
        try:
            result = serve(pending)
        except KvlinkError as error:
            result = "cut off" if pending.was_cut_off else type(error).__name__
            self._log_refused(error)
        except Exception:  # noqa: BLE001 - the top of a thread: one bad connection must not end the node
            _log.exception("a handshake failed inside kvlink")
        finally:
            self._forget(pending, result)

    def _forget(self, pending: _Pending, result: str) -> None:
        pending.link.close()
        with self._lock:
            self._pending.pop(pending, None)
            self._counts[result] += 1

    def _serve_pools(self, pending: _Pending) -> str:
        self._pools.serve(pending.link.connection, pending.deadline)
        return "pools passed"

    def _answer(self, pending: _Pending) -> str:
        try:
            self._welcome(pending)
        except PeerLost:
            raise
        except KvlinkError as error:
            handshake.refuse(pending.link, error)
            raise
        return "accepted"

    def _welcome(self, pending: _Pending) -> None:
        link = pending.link
        handshake.answer(link, self._keyring.secrets)
        pending.proven = True
        served = self._served
        if isinstance(served, KvlinkError):
            raise type(served)(*served.args)
        me = served.introduction
        handshake.send(link, me.as_source())
        target = handshake.receive_wish(link)
        if isinstance(target, wire.IntroduceAsker):
            with self._lock:
                self._pending.pop(pending, None)  # It has its own limit from here on.
            self._answerer.serve(link, target)
            return
        me.check_wanted(target)
        template = template_between(me.packed_layout, target.layout)
        token_valid_s = max(0.0, pending.deadline.remaining_s)
        handshake.send(link, me.welcome(target, pools=self._pools, token_valid_s=token_valid_s))
        # From here on the descriptor is the engine's, whether it succeeds or raises.
        peer = served.engine.attach_claimant(
            fd=link.detach(),
            dialect=link.dialect.number,
            epoch=target.epoch,
            name=target.name,
            address=pending.address,
            template=template,
            ucx_address=target.ucx_address,
            same_host=me.is_same_host(target),
        )
        served.claimants.note(target.epoch, digest_of(target.layout), peer)

    def _log_refused(self, error: KvlinkError) -> None:
        _log.debug("refused a connection: %s", error)
        if isinstance(error, AuthenticationFailed):
            self._warn_once("refused a connection: %s", error)

    def _warn_once(self, message: str, cause: object) -> None:
        """Tell the operator the first time; whoever floods the node must not flood its log."""
        with self._lock:
            warned, self._warned = self._warned, True
        if not warned:
            _log.warning("%s: " + message + " (said once; see the counters)", self._name, cause)
