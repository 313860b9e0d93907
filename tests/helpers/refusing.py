"""An object for worker processes that fails with one of kvlink's errors."""

from __future__ import annotations

from kvlink import errors

LOST = errors.FailedRange("full", "a", "k", 0, 2, 3, 9)


class Refusing:
    """Every method raises."""

    def lose_the_peer(self) -> None:
        raise errors.PeerLost("the peer is gone", failed=(LOST,), valid_prefix_tokens=3)
