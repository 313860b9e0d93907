"""Hearing of the events of some handles, in a thread of one's own, while users wait for theirs as they like."""

from __future__ import annotations

import itertools
import logging
import os
import select
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from kvlink.errors import OutOfMemory
from kvlink.handoff.handles import Handle

if TYPE_CHECKING:
    from kvlink.handoff.node import Node

__all__ = ["Follower"]

_log = logging.getLogger("kvlink")

# The bell ends every wait; this is how soon a follower that is closing is noticed.
_LOOK_AGAIN_S = 0.2
_MOST_EVENTS = 1024
# A handoff that is never released keeps no thread for ever.
_LONGEST_CLOSE_S = 60.0


class Follower:
    """Calls `happened` with each event of the handles that it follows: the outcome, and then the release.

    One call at a time, in a thread of its own, which ends with the node at the latest. What `happened`
    raises is logged.

    Raises
    ------
    OutOfMemory
        If there is no descriptor or thread to be had.
    """

    def __init__(self, node: Node, happened: Callable[[Handle, bool], None]) -> None:
        from kvlink import _native

        engine = node._running.life.engine
        self._running = node._running  # not the node, which nobody else may keep
        self._happened = happened
        self._completions = _native.Completions(cast("_native.Engine", engine))
        self._tokens = itertools.count(1)
        self._followed: dict[int, Handle] = {}
        self._closing = threading.Event()
        try:
            # Of our own: the native core closes its descriptor when it rings for the last time.
            self._bell = os.dup(engine.wake_fd())
            self._epoll = select.epoll()
            # Edge-triggered, since nobody reads this bell: see kvlink/handoff/awaiting.py.
            self._epoll.register(self._bell, select.EPOLLIN | select.EPOLLET)
            self._thread = threading.Thread(target=self._run, name="kvlink-follow", daemon=True)
            self._thread.start()
        except (OSError, RuntimeError) as error:
            raise OutOfMemory(f"follow handoffs of {node.name}: {error}") from None

    def follow(self, handle: Handle) -> None:
        """Tell of `handle` from now on, also what has happened already."""
        token = next(self._tokens)
        self._followed[token] = handle
        handle._handoff.report_to(self._completions, token)

    def close(self, *, deadline_s: float) -> None:
        """Go on until everything that is followed is released, at most `deadline_s` seconds. Idempotent."""
        self._closing.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=deadline_s)

    def _run(self) -> None:
        until: float | None = None
        try:
            while self._followed or not (self._closing.is_set() or self._running.closed):
                self._epoll.poll(_LOOK_AGAIN_S)
                while events := self._completions.take(_MOST_EVENTS, resets_bell=False):
                    for token, released in events:
                        self._tell(token, released)
                if self._closing.is_set():
                    until = until or time.monotonic() + _LONGEST_CLOSE_S
                    if time.monotonic() > until:
                        return
        finally:
            self._epoll.close()
            os.close(self._bell)

    def _tell(self, token: int, released: bool) -> None:
        handle = self._followed[token]
        if released:
            del self._followed[token]
        try:
            self._happened(handle, released)
        except Exception:  # noqa: BLE001 - the top of a thread: what one handoff does must not end it for all
            _log.exception("telling of %r failed", handle)
