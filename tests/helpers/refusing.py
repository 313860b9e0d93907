"""An object for worker processes that fails with one of kvlink's errors."""

from __future__ import annotations

from kvlink import errors


class Refusing:
    """Every method raises."""

    def lose_the_peer(self) -> None:
        raise errors.PeerLost("the peer is gone", failed=(("full", "a", "k", 3, 9),), valid_prefix_tokens=3)
