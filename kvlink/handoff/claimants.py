"""Which connections others have made to read from this node, so that a push finds the one to go by."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvlink.handoff.deadline import Deadline

__all__ = ["Claimants"]

# Lost ones are looked for once their number may have doubled, so each costs a constant.
_FEW = 64


class Claimants:
    """Knows the latest connection of each reader and share. Thread-safe; for one life of a node."""

    def __init__(self, is_lost: Callable[[int], bool]) -> None:
        self._is_lost = is_lost
        self._changed = threading.Condition(threading.RLock())
        self._peers: dict[tuple[bytes, bytes], int] = {}
        self._look_for_lost_at = _FEW

    def note(self, epoch: bytes, digest: bytes, peer: int) -> None:
        """Remember that `peer` of the native core reads from here, in the life `epoch`, the share `digest`."""
        with self._changed:
            self._peers[epoch, digest] = peer
            if len(self._peers) >= self._look_for_lost_at:
                self._peers = {key: one for key, one in self._peers.items() if not self._is_lost(one)}
                self._look_for_lost_at = max(_FEW, 2 * len(self._peers))
            self._changed.notify_all()

    def find(self, epoch: bytes, digest: bytes) -> int | None:
        """Return the number of that connection, if there is one."""
        with self._changed:
            peer = self._peers.get((epoch, digest))
        return None if peer is None or self._is_lost(peer) else peer

    def wait_for(self, epoch: bytes, digest: bytes, deadline: Deadline, *, most_s: float) -> int | None:
        """Return its number, once it is there; ``None`` after `most_s` seconds.

        Raises ``DeadlineExceeded`` or ``Closed`` once `deadline` is over.
        """
        patience = Deadline(most_s)
        while (peer := self.find(epoch, digest)) is None and patience.remaining_s > 0:
            slice_s = min(deadline.slice_s(), max(0.0, patience.remaining_s))
            with self._changed:
                if (epoch, digest) not in self._peers or self._is_lost(self._peers[epoch, digest]):
                    self._changed.wait(timeout=slice_s)
        return peer
