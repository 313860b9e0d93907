"""Asking a peer something, over a connection that both have authenticated: one question, one answer.

What has to be said in milliseconds and goes with bytes is the native core's; this is for the rest:
that a peer should connect, that a ticket waits under a key. A connection is kept for the next
question to the same peer, for a while, and has one question under way; further ones at the same
time have connections of their own, so that none waits behind a slow answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvlink import wire
from kvlink.errors import (
    Closed,
    DeadlineExceeded,
    InvalidArgument,
    KvlinkError,
    PeerLost,
    PeerUnreachable,
    ProtocolError,
    VersionMismatch,
    error_class,
)
from kvlink.handoff import handshake
from kvlink.handoff.address import split_address
from kvlink.handoff.answer import IDLE_S
from kvlink.handoff.deadline import Deadline
from kvlink.handoff.framed_socket import FramedSocket
from kvlink.handoff.introduction import check_source
from kvlink.handoff.outgoing import open_connection, with_retries

__all__ = ["Asker"]

# Idle connections that are kept to one peer, and over all.
_KEPT_TO_ONE = 4
_KEPT = 256

_Peer = tuple[str, bytes]


@dataclass(slots=True, kw_only=True, eq=False)
class _Session:
    """A connection on which this node may ask."""

    link: FramedSocket
    next_number: int = 0
    idle_since: float = 0.0

    def is_usable(self) -> bool:
        """Whether the peer has neither hung up nor will soon; it says nothing unasked."""
        return time.monotonic() - self.idle_since < IDLE_S / 2 and not self.link.wait_readable(timeout_s=0.0)


class Asker:
    """Asks other nodes in the name of one life of this one. Thread-safe; ``ask`` waits, so no user's thread calls it.

    Parameters
    ----------
    introduce
        Returns how this node introduces itself.
    """

    def __init__(
        self, introduce: Callable[[], wire.IntroduceAsker], *, keyring: handshake.Keyring, connect_timeout_s: float
    ) -> None:
        self._introduce = introduce
        self._keyring = keyring
        self._connect_timeout_s = connect_timeout_s
        self._lock = threading.RLock()
        self._idle: dict[_Peer, list[_Session]] = {}
        self._deadlines: set[Deadline] = set()  # of what is being asked
        self._closed: KvlinkError | None = None

    def ask(self, address: str, kind: str, body: bytes, *, deadline_s: float, epoch: bytes = b"") -> bytes:
        """Return what the node at `address` answers. `epoch`: the life it must be in; empty: any.

        Raises
        ------
        PeerUnreachable
            If there is no way to it.
        StalePeer
            If it is in another life.
        VersionMismatch
            If it is too old to be asked.
        DeadlineExceeded
            If it did not answer in time.
        KvlinkError
            What it answered with, or what is wrong with the connection.
        """
        if len(body) > wire.MOST_ASKED_BYTES:
            raise InvalidArgument(f"ask {kind}: {len(body)} bytes, at most {wire.MOST_ASKED_BYTES} can be asked")
        deadline = Deadline(deadline_s)
        peer = (address, epoch)
        with self._lock:
            if self._closed is not None:
                raise type(self._closed)(str(self._closed))
            self._deadlines.add(deadline)
        try:
            session = self._take(peer) or self._connect(peer, deadline)
            try:
                answer = _exchange(session, kind, body, deadline)
            except BaseException:
                session.link.close()  # An answer that comes late must not be taken for that of the next question.
                raise
            self._keep(peer, session)
        except KvlinkError as error:
            raise self._told(error, address, kind) from None
        finally:
            with self._lock:
                self._deadlines.discard(deadline)
        if answer.code:
            raise error_class(answer.code)(answer.message)
        return answer.body

    def close(self, why: KvlinkError) -> None:
        """Call off what is being asked, and refuse to ask more, for `why`. Idempotent."""
        with self._lock:
            self._closed = self._closed or why
            for deadline in self._deadlines:
                deadline.call_off()
            idle, self._idle = self._idle, {}
        for sessions in idle.values():
            for session in sessions:
                session.link.close()

    def _told(self, error: KvlinkError, address: str, kind: str) -> KvlinkError:
        """Return `error` as whoever asked should see it."""
        if isinstance(error, Closed) and self._closed is not None:
            return type(self._closed)(str(self._closed))
        if isinstance(error, PeerLost):
            return PeerLost(f"ask {address} for {kind!r}: {error} before it answered")
        return type(error)(f"ask {address} for {kind!r}: {error}")

    def _take(self, peer: _Peer) -> _Session | None:
        while True:
            with self._lock:
                sessions = self._idle.get(peer)
                if not sessions:
                    self._idle.pop(peer, None)
                    return None
                session = sessions.pop()
            if session.is_usable():
                return session
            session.link.close()

    def _keep(self, peer: _Peer, session: _Session) -> None:
        session.idle_since = time.monotonic()
        with self._lock:
            sessions = self._idle.setdefault(peer, [])
            is_full = len(sessions) >= _KEPT_TO_ONE or sum(map(len, self._idle.values())) >= _KEPT
            if self._closed is None and not is_full:
                sessions.append(session)
                return
        session.link.close()

    def _let_go(self) -> None:
        """Close what cannot be used any more: nobody comes again for connections to a life that has ended."""
        with self._lock:
            dead = {peer: [one for one in kept if not one.is_usable()] for peer, kept in self._idle.items()}
            self._idle = {
                peer: left
                for peer, kept in self._idle.items()
                if (left := [one for one in kept if one not in dead[peer]])
            }
        for sessions in dead.values():
            for session in sessions:
                session.link.close()

    def _connect(self, peer: _Peer, deadline: Deadline) -> _Session:
        self._let_go()
        address, epoch = peer
        try:
            place = split_address(address)
        except ValueError as error:
            raise InvalidArgument(str(error)) from None
        connecting = Deadline(min(max(0.0, deadline.remaining_s), self._connect_timeout_s))
        with self._lock:
            self._deadlines.add(connecting)
        try:
            return with_retries(lambda: self._connect_once(place, epoch, connecting), connecting)
        except DeadlineExceeded:
            raise PeerUnreachable("it did not answer in time; is the process alive and the network open?") from None
        finally:
            with self._lock:
                self._deadlines.discard(connecting)

    def _connect_once(self, place: tuple[str, int], epoch: bytes, deadline: Deadline) -> _Session:
        link = FramedSocket(open_connection(place, deadline), deadline)
        try:
            handshake.prove(link, self._keyring.secrets)
            introduced = handshake.receive(link, wire.IntroduceSource)
            if epoch:
                check_source(introduced, wanted_epoch=epoch)
            _check_asks(link, introduced.name)
            handshake.send(link, self._introduce())
        except BaseException as error:
            if isinstance(error, KvlinkError) and not isinstance(error, PeerLost):
                handshake.refuse(link, error)
            link.close()
            raise
        return _Session(link=link)


def _check_asks(link: FramedSocket, name: str) -> None:
    if not link.dialect.asks:
        raise VersionMismatch(f"{name} speaks a version that cannot be asked: upgrade it")


def _exchange(session: _Session, kind: str, body: bytes, deadline: Deadline) -> wire.Answer:
    session.link.allow(deadline)
    number = session.next_number
    session.next_number += 1
    remaining_ms = max(0, round(deadline.remaining_s * 1000))
    handshake.send(session.link, wire.Ask(number=number, kind=kind, remaining_ms=remaining_ms, body=body))
    answer = handshake.receive(session.link, wire.Answer)
    if answer.number != number:
        raise ProtocolError(f"question {number} was answered by an answer to question {answer.number}")
    return answer
