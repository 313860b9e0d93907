"""Connecting to the nodes that tickets name, in the background, one short-lived thread a peer."""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import threading
from dataclasses import dataclass, field

from kvlink import wire
from kvlink.config import Limits
from kvlink.errors import (
    Busy,
    Closed,
    DeadlineExceeded,
    KvlinkError,
    OutOfMemory,
    PeerLost,
    PeerUnreachable,
)
from kvlink.handoff import handshake
from kvlink.handoff.address import Address, SocketAddress, join_address, resolve, split_address
from kvlink.handoff.deadline import Deadline
from kvlink.handoff.framed_socket import FramedSocket
from kvlink.handoff.introduction import Introduction, template_between
from kvlink.handoff.lanes import LaneFacts, usable_lanes
from kvlink.handoff.native import NativeEngine
from kvlink.handoff.pool_socket import fetch_pools

__all__ = ["Dialer"]

_log = logging.getLogger("kvlink")

# The pulls that wait must hear that the peer is unreachable, and not only that their time is over.
_REPORT_MARGIN_S = 0.05
_REPORT_MARGIN_SHARE = 0.1
# A node that is flooded by strangers cuts off connections at random: worth another try.
_RETRY_AFTER_S = 0.02
_MOST_TRIES = 5


@dataclass(slots=True, kw_only=True)
class _Connecting:
    """One peer that is being dialed; pulls that want it are queued in the native core meanwhile."""

    peer: int
    address: Address
    name: str
    epoch: bytes
    deadline: Deadline
    link: FramedSocket | None = None
    thread: threading.Thread | None = field(default=None, repr=False)


class Dialer:
    """Finds or makes the connection to a source. Thread-safe."""

    def __init__(
        self,
        engine: NativeEngine,
        introduction: Introduction,
        *,
        secrets: handshake.Secrets,
        lanes: tuple[str, ...],
        limits: Limits,
    ) -> None:
        self._engine = engine
        self._introduction = introduction
        self._secrets = secrets
        self._lanes = lanes
        self._limits = limits
        self._lock = threading.RLock()
        self._peers: dict[bytes, int] = {}  # the latest slot of each source, connected or not
        self._connecting: dict[int, _Connecting] = {}
        self._closed = False

    def peer_for(self, *, address: str, name: str, epoch: bytes, deadline_s: float) -> int:
        """Return the slot of a source, dialing it if need be. Does not wait.

        Raises
        ------
        Busy
            If too many peers are being dialed.
        Closed
            If the node is closed.
        """
        allowed_s = deadline_s - min(_REPORT_MARGIN_S, deadline_s * _REPORT_MARGIN_SHARE)
        self._forget_if_lost(epoch)
        with self._lock:
            if self._closed:
                raise Closed("pull: the node is closed")
            peer = self._peers.get(epoch)
            if peer is not None:
                connecting = self._connecting.get(peer)
                if connecting is not None:
                    connecting.deadline.extend(allowed_s)
                return peer
            if len(self._connecting) >= self._limits.pending_connects:
                raise Busy(
                    f"pull from {name} ({address}): {len(self._connecting)} peers are being dialed already, "
                    "the most that limits.pending_connects allows; try again"
                )
            return self._start(address, name, epoch, allowed_s)

    def forget(self, epoch: bytes, peer: int) -> None:
        """Dial anew at the next pull, because the connection in slot `peer` is lost."""
        with self._lock:
            if self._peers.get(epoch) == peer:
                del self._peers[epoch]

    def _forget_if_lost(self, epoch: bytes) -> None:
        with self._lock:
            peer = self._peers.get(epoch)
            if peer is None or peer in self._connecting:
                return
        if self._engine.is_peer_lost(peer):
            self.forget(epoch, peer)

    def drop(self, name: str) -> None:
        """Call off the dialing of every peer called `name`."""
        with self._lock:
            for connecting in self._connecting.values():
                if connecting.name == name:
                    _call_off(connecting)

    def close(self, *, deadline_s: float) -> None:
        """Call off all dialing and wait for the threads. Idempotent.

        A thread that waits for the name service cannot be interrupted; it is left to end by itself.
        """
        with self._lock:
            self._closed = True
            all_connecting = list(self._connecting.values())
            for connecting in all_connecting:
                _call_off(connecting)
        deadline = Deadline(deadline_s)
        for connecting in all_connecting:
            if connecting.thread is not None and connecting.thread is not threading.current_thread():
                connecting.thread.join(timeout=max(0.0, deadline.remaining_s))

    def _start(self, address: str, name: str, epoch: bytes, allowed_s: float) -> int:
        peer = self._engine.expect_peer(address=address)
        connecting = _Connecting(
            peer=peer,
            address=split_address(address),
            name=name,
            epoch=epoch,
            deadline=Deadline(allowed_s, most_s=self._limits.connect_timeout_s),
        )
        thread = threading.Thread(target=self._connect, args=(connecting,), name="kvlink-connect", daemon=True)
        connecting.thread = thread
        try:
            thread.start()
        except RuntimeError as error:  # the operating system's limit on threads
            message = f"connect to {_where(connecting)}: {error}"
            self._engine.fail_peer(peer, code=OutOfMemory.__name__, message=message)
            raise OutOfMemory(message) from None
        # The new thread cannot miss these: it takes the lock before it ends.
        self._peers[epoch] = peer
        self._connecting[peer] = connecting
        return peer

    def _connect(self, connecting: _Connecting) -> None:
        """Top of the connecting thread: whatever happens, the waiting pulls are told."""
        try:
            self._try_until_connected(connecting)
        except KvlinkError as error:
            self._report(connecting, error)
        except Exception as error:  # noqa: BLE001 - the top of a thread: pulls must not wait in vain
            _log.exception("connecting to %s failed inside kvlink", _where(connecting))
            self._report(connecting, PeerUnreachable(f"{type(error).__name__}: {error}"))
        finally:
            with self._lock:
                self._connecting.pop(connecting.peer, None)

    def _report(self, connecting: _Connecting, error: KvlinkError) -> None:
        self.forget(connecting.epoch, connecting.peer)
        if isinstance(error, DeadlineExceeded):
            error = PeerUnreachable("it did not answer in time; is the process alive and the network open?")
        elif isinstance(error, PeerLost):
            error = PeerUnreachable(f"{error} during the handshake")
        message = f"connect to {_where(connecting)}: {error}"
        _log.debug("%s", message)
        try:
            self._engine.fail_peer(connecting.peer, code=type(error).__name__, message=message)
        except Closed:
            return  # Closing has failed the waiting pulls already.

    def _try_until_connected(self, connecting: _Connecting) -> None:
        tries = 0
        while True:
            tries += 1
            try:
                return self._try_once(connecting)
            except PeerLost:
                if tries == _MOST_TRIES or self._closed:
                    raise
            threading.Event().wait(min(_RETRY_AFTER_S * 2**tries, connecting.deadline.slice_s()))

    def _try_once(self, connecting: _Connecting) -> None:
        link = FramedSocket(_open_connection(connecting.address, connecting.deadline), connecting.deadline)
        with self._lock:
            connecting.link = link
        try:
            self._introduce(connecting, link)
        except KvlinkError as error:
            if not isinstance(error, PeerLost):
                handshake.refuse(link, error)
            raise
        finally:
            link.close()

    def _introduce(self, connecting: _Connecting, link: FramedSocket) -> None:
        handshake.prove(link, self._secrets)
        me = self._introduction
        link.send(wire.encode(me.as_target(wanted_epoch=connecting.epoch)))
        source = handshake.receive(link, wire.IntroduceSource)
        layout = me.check_source(source, wanted_epoch=connecting.epoch)
        template = template_between(source.layout, me.packed_layout)
        same_host = me.is_same_host(source)
        region_fds, pid = [-1] * len(layout.region_bytes), 0
        if same_host:
            region_fds, pid = fetch_pools(
                source.pool_socket, source.pool_token, mappable=source.mappable, deadline=connecting.deadline
            )
        try:
            lanes = self._usable_lanes(source, region_fds=region_fds, pid=pid)
            link.send(wire.encode(wire.Welcome()))
            fd = link.detach()
        except BaseException:
            _close_all(region_fds)
            raise
        # From here on the descriptors are the engine's, whether it succeeds or raises.
        self._engine.attach_source(
            connecting.peer,
            fd=fd,
            epoch=source.epoch,
            name=source.name,
            template=template,
            region_bytes=list(layout.region_bytes),
            region_addresses=source.region_addresses,
            region_fds=region_fds,
            pid=pid,
            keys=source.keys,
            ucx_address=source.ucx_address,
            same_host=same_host,
            lanes=lanes,
        )

    def _usable_lanes(self, source: wire.IntroduceSource, *, region_fds: list[int], pid: int) -> list[str]:
        facts = LaneFacts(
            same_host=self._introduction.is_same_host(source),
            mapped_regions=-1 not in region_fds,
            readable_pid=pid,
            ucx=bool(source.ucx_address and self._introduction.ucx_address),
            keys=bool(source.keys) and all(source.keys),
        )
        return usable_lanes(facts, allowed=self._lanes)


def _open_connection(address: Address, deadline: Deadline) -> socket.socket:
    causes = []
    for family, place in resolve(address):
        try:
            return _connect_to(family, place, deadline)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise PeerUnreachable(f"this process is out of descriptors or memory: {error.strerror}") from None
            causes.append(f"{place[0]}: {error.strerror or error}")
    raise PeerUnreachable(f"{'; '.join(causes)}; is the node still running, and is this its address?")


def _connect_to(family: socket.AddressFamily, place: SocketAddress, deadline: Deadline) -> socket.socket:
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        status = connection.connect_ex(place)
        if status == errno.EINPROGRESS:
            poller = select.poll()
            poller.register(connection, select.POLLOUT)
            while not poller.poll(deadline.slice_s() * 1000):
                pass
            status = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        _raise_if_error(status)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        connection.close()
        raise
    return connection


def _raise_if_error(status: int) -> None:
    if status:
        raise OSError(status, os.strerror(status))


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        if descriptor >= 0:
            os.close(descriptor)


def _call_off(connecting: _Connecting) -> None:
    connecting.deadline.call_off()
    if connecting.link is not None:
        connecting.link.abort()


def _where(connecting: _Connecting) -> str:
    return f"{connecting.name} ({join_address(*connecting.address)})"
