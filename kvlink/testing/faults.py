"""Lanes that go wrong by script and seed: what an engine adapter has to survive, whenever it likes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlink.errors import InvalidArgument

if TYPE_CHECKING:
    from kvlink.handoff import Node

__all__ = ["FaultCounts", "FaultScript", "inject_faults", "remove_faults"]

_MOST_MS = 3_600_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultScript:
    """What goes wrong with the bytes that a node pulls.

    A piece is a block pair of the plan; on the lane ``staged`` it is a chunk. Each decision is drawn
    from `seed`, the number of the transfer since the injection, and the number of the piece, so the
    same handoffs in the same order meet the same faults.

    Attributes
    ----------
    seed
        Of all draws.
    delay_ms
        Each piece is posted, or taken from the network, up to so much later. The order stays.
    drop
        Share of the pieces that never arrive.
    duplicate
        Share of the pieces that arrive a second time, up to `delay_ms` after the first.
    corrupt
        Share of the pieces in which one bit turns over on the way.
    reorder
        Whether pieces overtake each other.
    fail_after_bytes
        The lane fails once so many bytes of a transfer are under way.
    no_resource
        How often posting a piece is refused at first, each time for half a millisecond.
    like_rc
        As a reliable connection over a network: a cancel stops nothing, late bytes land, and the
        lane tells an error only `error_after_s` after its cause.
    error_after_s
        That time.
    """

    seed: int = 0
    delay_ms: float = 0.0
    drop: float = 0.0
    duplicate: float = 0.0
    corrupt: float = 0.0
    reorder: bool = False
    fail_after_bytes: int | None = None
    no_resource: int = 0
    like_rc: bool = False
    error_after_s: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what is no share, no time and no count."""
        for name in ("drop", "duplicate", "corrupt"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise InvalidArgument(f"fault script: {name} is {getattr(self, name)!r}, a share lies between 0 and 1")
        for name, value in (("delay_ms", self.delay_ms), ("error_after_s", 1000 * self.error_after_s)):
            if not 0.0 <= value <= _MOST_MS:
                raise InvalidArgument(f"fault script: {name} must be between 0 and an hour")
        for name in ("seed", "no_resource", "fail_after_bytes"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < (1 << 31):
                raise InvalidArgument(f"fault script: {name} is {value!r}, it must be in [0, 2^31)")


class FaultCounts:
    """What came of one script. May be read after the node has closed."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def read(self) -> dict[str, int]:
        """Return the counts by name.

        ``transfers``, ``pieces``, ``dropped``, ``duplicated``, ``corrupted`` and ``refused`` pieces, ``failed``
        transfers, ``late`` pieces (posted or taken after a cancel), and ``midway``: transfers that were
        cancelled with some of their bytes here and some not.
        """
        counts: dict[str, int] = self._native.read()
        return counts


def _engine(node: Node) -> Any:
    """Return the native core of a node: what the public face does not show."""
    return node._running.life.engine


def inject_faults(node: Node, script: FaultScript) -> FaultCounts:
    """Make everything that `node` pulls from now on go wrong by `script`; what moves already goes on.

    Raises
    ------
    Closed
        If the node is closed.
    """
    from kvlink import _native

    native = _native.inject_faults(
        _engine(node),
        seed=script.seed,
        delay_ms=script.delay_ms,
        drop=script.drop,
        duplicate=script.duplicate,
        corrupt=script.corrupt,
        reorder=script.reorder,
        fail_after_bytes=script.fail_after_bytes,
        no_resource=script.no_resource,
        like_rc=script.like_rc,
        error_after_ms=1000 * script.error_after_s,
    )
    return FaultCounts(native)


def remove_faults(node: Node) -> None:
    """Let what `node` pulls from now on go right again.

    Raises
    ------
    Closed
        If the node is closed.
    """
    from kvlink import _native

    _native.remove_faults(_engine(node))
