"""What this stage needs of the native core, as types: the seam that tests put a fake behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kvlink.handoff.block_tables import BlockTable

if TYPE_CHECKING:
    from kvlink._native import Completions, Conversion, Template

bytes_ = bytes
"""A handle has a property of that name."""

__all__ = ["NativeEngine", "NativeHandoff", "NativePush"]


class NativeHandoff(Protocol):
    """One handoff of this node. Thread-safe."""

    @property
    def epoch(self) -> bytes:
        """Life of the node that made the offer."""

    @property
    def sequence(self) -> int:
        """Number of the offer in that life."""

    @property
    def label(self) -> str:
        """The user's own name for it."""

    @property
    def state(self) -> str:
        """Where it stands."""

    @property
    def outcome(self) -> str | None:
        """``"succeeded"``, ``"failed"`` or ``None``."""

    @property
    def ended(self) -> tuple[Any, ...] | None:
        """Error, failed ranges, valid prefix, bytes, lane, phases and payload, once there is an outcome."""

    @property
    def released(self) -> bool:
        """Whether nothing will touch the blocks any more."""

    @property
    def error(self) -> tuple[str, str] | None:
        """Name of the error class, and its message."""

    @property
    def failed(self) -> Sequence[tuple[str, str, str, int, int, int, int]]:
        """What did not arrive."""

    @property
    def valid_prefix_tokens(self) -> int:
        """Tokens from the start that may be used after a failure."""

    @property
    def lane(self) -> str:
        """How they moved."""

    @property
    def phases_s(self) -> dict[str, float]:
        """Seconds of each phase."""

    @property
    def payload(self) -> bytes:
        """Small bytes that came with the grant."""

    def report_to(self, completions: Completions, token: int) -> None:
        """Have both events put there, also those that have come already."""

    def cancel(self) -> None:
        """Ask to end it."""

    def wait(self, *, timeout_s: float) -> bool:
        """Wait for the outcome; return whether it has come."""

    def wait_released(self, *, timeout_s: float) -> bool:
        """Wait until the blocks are released; return whether they are."""

    @property
    def bytes(self) -> int:
        """Bytes moved. Last, since the name hides the type from what follows."""


class NativePush(NativeHandoff, Protocol):
    """One push of this node. Thread-safe; nothing of it waits."""

    def start(self, peer: int) -> None:
        """Push to this claimant."""

    def fail(self, *, code: str, message: str) -> None:
        """Fail it with this class and message."""

    def add(self, blocks: list[BlockTable]) -> None:
        """Hold more blocks."""

    def hold_back(self, layers: list[str], first: int, end: int) -> int:
        """Say that these layers, or all, will be ready for these tokens; return the number to announce."""

    def announce(self, number: int) -> None:
        """Say that they are."""

    def commit(self, payload: bytes_) -> None:
        """Say that all is ready."""


class NativeEngine(Protocol):
    """The native node. Thread-safe; nothing but ``close`` waits."""

    def close(self, *, deadline_s: float, code: str = ..., message: str = ...) -> None:
        """Fail what lives, and end the threads. Later calls fail with the same class and message."""

    def refuse_new(self, *, code: str, message: str) -> None:
        """Refuse offers, pulls and claims of what was not offered here."""

    def accept_new(self) -> None:
        """Take them again."""

    def fileno(self) -> int:
        """Return the eventfd for users."""

    def wake_fd(self) -> int:
        """Return the eventfd for ``Awaiters``, which nobody reads."""

    def ucx_address(self) -> bytes:
        """Return the UCX worker's address; empty without UCX."""

    def pack_keys(self) -> list[bytes]:
        """Return one packed remote key for each region."""

    def expect_peer(self, *, address: str) -> int:
        """Return the number of a peer that will be connected; pulls may be queued on it at once."""

    def attach_source(
        self,
        peer: int,
        *,
        fd: int,
        dialect: int,
        epoch: bytes,
        name: str,
        template: Template,
        conversion: Conversion | None,
        region_bytes: list[int],
        region_addresses: list[int],
        region_fds: list[int],
        pid: int,
        keys: list[bytes],
        ucx_address: bytes,
        same_host: bool,
        lanes: list[str],
    ) -> list[str]:
        """Connect an expected peer. Takes all descriptors over, also when it raises."""

    def attach_claimant(
        self,
        *,
        fd: int,
        dialect: int,
        epoch: bytes,
        name: str,
        address: str,
        template: Template,
        ucx_address: bytes,
        same_host: bool,
    ) -> int:
        """Connect a peer that dialed. Takes its descriptor over, also when it raises."""

    def fail_peer(self, peer: int, *, code: str, message: str) -> None:
        """End a connection, or an attempt at one; what lives on it fails so."""

    def is_peer_lost(self, peer: int) -> bool:
        """Return whether the connection, or the attempt at one, is over. Cheap."""

    def peers(self) -> list[dict[str, Any]]:
        """Return how each peer stands."""

    def holds(self) -> dict[str, int]:
        """Return how many blocks and handoffs are held."""

    def counters(self) -> dict[str, int]:
        """Return what was counted."""

    def offer(
        self,
        *,
        blocks: list[BlockTable],
        num_tokens: int,
        ttl_ms: int,
        retry_ms: int | None = None,
        readers: int,
        payload: bytes,
        label: str,
        integrity: str = "",
        minted: tuple[bytes, int] | None = None,
    ) -> NativeHandoff:
        """Offer blocks."""

    def pull(
        self,
        sources: list[tuple[int, bytes, int]],
        *,
        blocks: list[BlockTable],
        num_tokens: int,
        skip_tokens: int,
        deadline_ms: int,
        lane: str,
        integrity: str = "",
        ranks: int = 1,
        label: str,
    ) -> NativeHandoff:
        """Read an offer's blocks from its sources, each a peer and the epoch and sequence of the ticket."""

    def reserve(
        self,
        sources: list[tuple[int, bytes]],
        *,
        blocks: list[BlockTable],
        num_tokens: int,
        skip_tokens: int,
        ttl_ms: int,
        lane: str,
        integrity: str = "",
        label: str,
    ) -> NativeHandoff:
        """Hold blocks for one node to push into, or for each of `sources`, which are peers and their epochs."""

    def push(
        self,
        reservation: tuple[bytes, int],
        *,
        blocks: list[BlockTable],
        num_tokens: int,
        deadline_ms: int,
        at_once: bool,
        integrity: str = "",
        label: str,
    ) -> NativePush:
        """Push blocks into the reservation of this epoch and sequence, once ``start`` says to whom."""
