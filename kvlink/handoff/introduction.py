"""What two nodes tell each other once both have proved the secret, and what they make of it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvlink import wire
from kvlink.errors import InvalidArgument, ProtocolError, StalePeer
from kvlink.handoff.pool_socket import PoolSocket
from kvlink.layout import CacheLayout, validate_layout
from kvlink.plan import compile_template

if TYPE_CHECKING:
    from kvlink._native import Template

__all__ = ["Introduction", "host_id", "template_between", "unpack_layout"]

_TEMPLATES_KEPT = 32


@functools.cache
def host_id() -> bytes:
    """Return what is equal in two processes exactly when one kernel runs both; empty if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()[:64]
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

    def as_target(self, *, wanted_epoch: bytes) -> wire.IntroduceTarget:
        """Return what the dialer tells."""
        return wire.IntroduceTarget(
            epoch=self.epoch,
            wanted_epoch=wanted_epoch,
            name=self.name,
            host_id=host_id(),
            ucx_address=self.ucx_address,
            layout=self.packed_layout,
        )

    def as_source(self, *, same_host: bool, pools: PoolSocket, token_valid_s: float) -> wire.IntroduceSource:
        """Return what the acceptor tells. Where its memory lies, it tells only who can read it by address."""
        by_address = same_host or any(self.keys)
        return wire.IntroduceSource(
            epoch=self.epoch,
            name=self.name,
            host_id=host_id(),
            ucx_address=self.ucx_address,
            layout=self.packed_layout,
            region_addresses=list(self.region_addresses) if by_address else [0] * len(self.region_addresses),
            keys=list(self.keys),
            mappable=list(self.mappable) if same_host else [False] * len(self.mappable),
            pool_socket=pools.name if same_host else b"",
            pool_token=pools.issue_token(valid_s=token_valid_s) if same_host else b"",
        )

    def is_same_host(self, peer: wire.IntroduceSource | wire.IntroduceTarget) -> bool:
        """Return whether one kernel runs both."""
        return bool(host_id()) and peer.host_id == host_id()

    def check_wanted(self, target: wire.IntroduceTarget) -> None:
        """Refuse a dialer that looks for an earlier node at this address.

        Raises
        ------
        StalePeer
            If its ticket is of another life.
        """
        if target.wanted_epoch != self.epoch:
            raise StalePeer(_stale(self.name, wanted=target.wanted_epoch, found=self.epoch))

    def check_source(self, source: wire.IntroduceSource, *, wanted_epoch: bytes) -> CacheLayout:
        """Return the layout of the node that was dialed, once everything it told fits together.

        Raises
        ------
        StalePeer
            If it is not the node that made the ticket.
        ProtocolError
            If its lists or its layout contradict each other.
        """
        if source.epoch != wanted_epoch:
            raise StalePeer(_stale(source.name, wanted=wanted_epoch, found=source.epoch))
        layout = unpack_layout(source.layout)
        regions = len(layout.region_bytes)
        for field in ("region_addresses", "mappable"):
            told: Sequence[object] = getattr(source, field)
            if len(told) != regions:
                raise ProtocolError(f"the peer told {len(told)} {field} for {regions} regions")
        if len(source.keys) not in (0, regions):
            raise ProtocolError(f"the peer told {len(source.keys)} keys for {regions} regions")
        return layout


def unpack_layout(packed: bytes) -> CacheLayout:
    """Return the layout that a peer told, once it is free of contradictions.

    Raises
    ------
    ProtocolError
        If it is not.
    """
    try:
        layout: CacheLayout = msgspec.msgpack.decode(packed, type=CacheLayout)
        validate_layout(layout)
    except (msgspec.DecodeError, RecursionError, InvalidArgument) as error:
        raise ProtocolError(f"the peer's layout contradicts itself: {error}") from None
    return layout


@functools.lru_cache(maxsize=_TEMPLATES_KEPT)
def template_between(packed_source: bytes, packed_target: bytes) -> Template:
    """Return the copies of one block pair. Kept: the peers of one fleet have few different layouts.

    Raises
    ------
    LayoutMismatch
        If the two caches cannot be paired.
    ProtocolError
        If a layout contradicts itself.
    """
    return compile_template(unpack_layout(packed_source), unpack_layout(packed_target))


def _stale(name: str, *, wanted: bytes, found: bytes) -> str:
    return (
        f"the node {name!r} at this address was restarted: the ticket is of its life {wanted.hex()[:8]} "
        f"and it is in {found.hex()[:8]} now; what was offered is gone, so prefill again"
    )
