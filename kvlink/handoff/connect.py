"""Connecting to one source: dialing it, proving the secret, and agreeing on what it delivers."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from kvlink import wire
from kvlink.errors import KvlinkError, PeerLost
from kvlink.handoff import handshake
from kvlink.handoff.address import split_address
from kvlink.handoff.deadline import Deadline
from kvlink.handoff.framed_socket import FramedSocket
from kvlink.handoff.introduction import Introduction, check_source, check_welcome
from kvlink.handoff.native import NativeEngine
from kvlink.handoff.outgoing import open_connection, with_retries
from kvlink.handoff.pairing import Share, run_bytes_between, template_between, unpack_layout
from kvlink.handoff.pool_socket import fetch_pools
from kvlink.handoff.ticket import TicketSource
from kvlink.transport import LaneChoice, LaneFacts, choose_lanes

__all__ = ["Connector", "Meeting"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Meeting:
    """A connection whose source has introduced itself. Its owner closes ``link``, or joins."""

    link: FramedSocket
    source: wire.IntroduceSource


class Connector:
    """Takes connections to sources through their handshake. Thread-safe."""

    def __init__(
        self,
        engine: NativeEngine,
        introduction: Introduction,
        *,
        keyring: handshake.Keyring,
        lanes: tuple[str, ...],
    ) -> None:
        self._engine = engine
        self._introduction = introduction
        self._keyring = keyring
        self._lanes = lanes

    def meet(self, source: TicketSource, deadline: Deadline) -> Meeting:
        """Connect to `source` and let it introduce itself.

        Raises
        ------
        PeerUnreachable
            If there is no way to it.
        AuthenticationFailed, VersionMismatch, StalePeer, ProtocolError
            If it is not who it should be, or breaks the protocol.
        PeerLost, DeadlineExceeded, Closed
            If it hung up again and again, time ran out, or connecting was called off.
        """
        return with_retries(lambda: self._meet_once(source, deadline), deadline)

    def join(
        self,
        source: TicketSource,
        share: Share,
        *,
        peer: int,
        deadline: Deadline,
        announce: Callable[[LaneChoice], None],
        meeting: Meeting | None = None,
    ) -> LaneChoice:
        """Agree with `source` on `share`, and give the connection to the native core, as its number `peer`.

        Uses `meeting` up, if there is one. Returns how the bytes will come; `announce` hears before
        the first of them how they should.

        Raises
        ------
        LayoutMismatch, LaneUnavailable
            If its cache cannot be paired with `share`, or no lane leads to it.
        KvlinkError
            As in ``meet``.
        """
        met = [] if meeting is None else [meeting]

        def attempt() -> LaneChoice:
            current = met.pop() if met else self._meet_once(source, deadline)
            try:
                welcome = self._agree(current, share, wanted_epoch=source.epoch_bytes)
                return self._attach(current, welcome, share, peer=peer, deadline=deadline, announce=announce)
            finally:
                current.link.close()

        return with_retries(attempt, deadline)

    def _meet_once(self, source: TicketSource, deadline: Deadline) -> Meeting:
        link = FramedSocket(open_connection(split_address(source.address), deadline), deadline)
        try:
            handshake.prove(link, self._keyring.secrets)
            introduced = handshake.receive(link, wire.IntroduceSource)
            check_source(introduced, wanted_epoch=source.epoch_bytes)
            unpack_layout(introduced.layout)
        except BaseException as error:
            _refuse(link, error)
            link.close()
            raise
        return Meeting(link=link, source=introduced)

    def _agree(self, meeting: Meeting, share: Share, *, wanted_epoch: bytes) -> wire.Welcome:
        link = meeting.link
        try:
            template_between(meeting.source.layout, share.packed)
        except KvlinkError as error:
            _refuse(link, error)
            raise
        # The acceptor answers this with its last word, and what comes after that goes to its engine: from here on this
        # side can only hang up, whatever goes wrong.
        handshake.send(link, self._introduction.as_target(wanted_epoch=wanted_epoch, share=share.packed))
        return handshake.receive(link, wire.Welcome)

    def _attach(
        self,
        meeting: Meeting,
        welcome: wire.Welcome,
        share: Share,
        *,
        peer: int,
        deadline: Deadline,
        announce: Callable[[LaneChoice], None],
    ) -> LaneChoice:
        source = meeting.source
        region_bytes = list(unpack_layout(source.layout).region_bytes)
        check_welcome(welcome, regions=len(region_bytes))
        same_host = self._introduction.is_same_host(source)
        region_fds, pid = [-1] * len(region_bytes), 0
        if same_host:
            region_fds, pid = fetch_pools(
                welcome.pool_socket, welcome.pool_token, mappable=welcome.mappable, deadline=deadline
            )
        try:
            choice = self._choose_lanes(source, welcome, share, region_fds=region_fds, pid=pid)
            announce(choice)
            fd = meeting.link.detach()
        except BaseException:
            _close_all(region_fds)
            raise
        # From here on the descriptors are the engine's, whether it succeeds or raises.
        usable = self._engine.attach_source(
            peer,
            fd=fd,
            dialect=meeting.link.dialect.number,
            epoch=source.epoch,
            name=source.name,
            template=template_between(source.layout, share.packed),
            conversion=share.conversion,
            region_bytes=region_bytes,
            region_addresses=welcome.region_addresses,
            region_fds=region_fds,
            pid=pid,
            keys=welcome.keys,
            ucx_address=welcome.ucx_address,
            same_host=same_host,
            # Those that cannot be had too: the engine then says why, should one of them be required.
            lanes=[*choice.lanes, *(lane for lane in self._lanes if lane not in choice.lanes)],
        )
        return choice.among(usable)

    def _choose_lanes(
        self, source: wire.IntroduceSource, welcome: wire.Welcome, share: Share, *, region_fds: list[int], pid: int
    ) -> LaneChoice:
        facts = LaneFacts(
            same_host=self._introduction.is_same_host(source),
            mapped_regions=-1 not in region_fds,
            readable_pid=pid,
            ucx=bool(welcome.ucx_address and self._introduction.ucx_address),
            keys=bool(welcome.keys) and all(welcome.keys),
            run_bytes=run_bytes_between(source.layout, share.packed),
        )
        return choose_lanes(facts, allowed=self._lanes)


def _refuse(link: FramedSocket, error: BaseException) -> None:
    if isinstance(error, KvlinkError) and not isinstance(error, PeerLost):
        handshake.refuse(link, error)


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        if descriptor >= 0:
            os.close(descriptor)
