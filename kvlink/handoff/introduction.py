"""What two nodes tell each other once both have proved the secret, and what they check of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvlink import wire
from kvlink.errors import ProtocolError, StalePeer
from kvlink.handoff.pool_socket import PoolSocket

__all__ = ["Introduction", "check_source", "check_welcome", "host_id"]


def host_id() -> bytes:
    """Return what is equal in two processes exactly when the lanes of one host work between them; empty if unknown.

    One kernel has to run both, and both have to be in one network namespace: the socket that pools go over
    has its name there, and so have those by which UCX wakes the reader of its shared memory.
    """
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{kernel} {os.readlink('/proc/self/ns/net')}".encode()[:64]
    except OSError:
        return b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """The own node as its peers see it. Immutable, shared by all connecting threads."""

    epoch: bytes
    name: str
    packed_layout: bytes
    region_addresses: tuple[int, ...]
    mappable: tuple[bool, ...]
    keys: tuple[bytes, ...]
    ucx_address: bytes
    host_id: bytes = field(default_factory=host_id)  # read when the node starts, as UCX reads its own then

    def as_source(self) -> wire.IntroduceSource:
        """Return what the acceptor tells."""
        return wire.IntroduceSource(epoch=self.epoch, name=self.name, host_id=self.host_id, layout=self.packed_layout)

    def as_target(self, *, wanted_epoch: bytes, share: bytes) -> wire.IntroduceTarget:
        """Return what the dialer tells a source that delivers `share`, packed."""
        return wire.IntroduceTarget(
            epoch=self.epoch,
            wanted_epoch=wanted_epoch,
            name=self.name,
            host_id=self.host_id,
            ucx_address=self.ucx_address,
            layout=share,
        )

    def welcome(self, target: wire.IntroduceTarget, *, pools: PoolSocket, token_valid_s: float) -> wire.Welcome:
        """Return the acceptor's last word. Where its memory lies, it tells only who can read it by address."""
        same_host = self.is_same_host(target)
        by_address = same_host or any(self.keys)
        return wire.Welcome(
            ucx_address=self.ucx_address,
            region_addresses=list(self.region_addresses) if by_address else [0] * len(self.region_addresses),
            keys=list(self.keys),
            mappable=list(self.mappable) if same_host else [False] * len(self.mappable),
            pool_socket=pools.name if same_host else b"",
            pool_token=pools.issue_token(valid_s=token_valid_s) if same_host else b"",
        )

    def is_same_host(self, peer: wire.IntroduceSource | wire.IntroduceTarget) -> bool:
        """Return whether the lanes of one host work between both."""
        return bool(self.host_id) and peer.host_id == self.host_id

    def check_wanted(self, target: wire.IntroduceTarget) -> None:
        """Refuse a dialer that looks for an earlier node at this address.

        Raises
        ------
        StalePeer
            If its ticket is of another life.
        """
        if target.wanted_epoch != self.epoch:
            raise StalePeer(_stale(self.name, wanted=target.wanted_epoch, found=self.epoch))


def check_source(source: wire.IntroduceSource, *, wanted_epoch: bytes) -> None:
    """Check that the node which was dialed is the one that the ticket names.

    Raises
    ------
    StalePeer
        If it is not.
    """
    if source.epoch != wanted_epoch:
        raise StalePeer(_stale(source.name, wanted=wanted_epoch, found=source.epoch))


def check_welcome(welcome: wire.Welcome, *, regions: int) -> None:
    """Check that what the acceptor tells of its regions fits to the layout that it told.

    Raises
    ------
    ProtocolError
        If it does not.
    """
    for name in ("region_addresses", "mappable"):
        told: Sequence[object] = getattr(welcome, name)
        if len(told) != regions:
            raise ProtocolError(f"the peer told {len(told)} {name} for {regions} regions")
    if len(welcome.keys) not in (0, regions):
        raise ProtocolError(f"the peer told {len(welcome.keys)} keys for {regions} regions")


def _stale(name: str, *, wanted: bytes, found: bytes) -> str:
    return (
        f"the node {name!r} at this address was restarted: the ticket is of its life {wanted.hex()[:8]} "
        f"and it is in {found.hex()[:8]} now; what was offered is gone, so prefill again"
    )
