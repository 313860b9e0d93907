"""A point in time that waiting threads look at again and again."""

from __future__ import annotations

import time

from kvlink.errors import Closed, DeadlineExceeded

__all__ = ["Deadline"]

# A waiter sleeps no longer than this before it looks again, so that an extension and the closing of
# the node are noticed; nobody has to know which descriptor the waiter sleeps on.
_SLICE_S = 0.1


class Deadline:
    """When to give up. Any thread may move it out or call it off.

    A pull that joins the connecting of another one moves the deadline out to its own, but never
    beyond `most_s` seconds from the start.
    """

    def __init__(self, seconds: float, *, most_s: float | None = None) -> None:
        now = time.monotonic()
        self._last = now + (seconds if most_s is None else most_s)
        self._at = min(now + seconds, self._last)
        self._called_off = False

    def extend(self, seconds: float) -> None:
        """Move the deadline to `seconds` from now, unless it is later already or was called off."""
        if not self._called_off:
            self._at = min(max(self._at, time.monotonic() + seconds), self._last)

    def call_off(self) -> None:
        """Let no time remain, and make every waiter end with ``Closed`` soon."""
        self._called_off = True
        self._at = min(self._at, time.monotonic())

    @property
    def remaining_s(self) -> float:
        """Seconds left; negative when it has passed."""
        return self._at - time.monotonic()

    def slice_s(self) -> float:
        """Return how long the caller may sleep before it asks again.

        Raises
        ------
        DeadlineExceeded
            If the time has passed.
        Closed
            If it was called off.
        """
        if self._called_off:
            raise Closed("the node was closed meanwhile")
        remaining = self.remaining_s
        if remaining <= 0:
            raise DeadlineExceeded("the deadline passed")
        return min(remaining, _SLICE_S)
