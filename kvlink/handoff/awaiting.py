"""``await`` on handoffs: no thread a handoff, and no loop that takes another loop's wakeup.

The native core rings one eventfd, the awaiters' bell, at every event of every handle. Each asyncio
loop that awaits something of the node watches the bell through an epoll instance of its own,
registered edge-triggered. Each ring makes every such epoll instance readable once; a loop consumes
that readiness from its own instance only. Nobody ever reads the bell itself, so one loop's wakeup
cannot be eaten by another, nor by the user, whose ``Node.fileno`` is another eventfd. (The bell's
counter only grows: at a million rings a second it is full after 580,000 years.)
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvlink.errors import Closed, OutOfMemory

if TYPE_CHECKING:
    import asyncio

__all__ = ["Awaiters"]

_Waiter = tuple[Callable[[], bool], "asyncio.Future[None]"]


class Awaiters:
    """The loops that wait for events of one node. Thread-safe."""

    def __init__(self, bell: int) -> None:
        # A descriptor of our own: epoll forgets a bell once its last descriptor is closed, and the
        # native core closes its own in the moment in which it rings for the last time.
        self._bell = os.dup(bell)
        self._lock = threading.RLock()
        self._watches: dict[asyncio.AbstractEventLoop, _LoopWatch] = {}
        self._closed = False

    async def until(self, happened: Callable[[], bool]) -> None:
        """Wait until `happened` is true; it is asked again after each ring of the bell.

        It must be cheap, thread-safe, and stay true. There is no timeout here: every handoff has
        its outcome by its own deadline, and closing the node ends all of them.
        """
        if happened():
            return
        import asyncio  # here, since it takes 30 ms and most processes with a node never await

        loop = asyncio.get_running_loop()
        with self._lock:
            if self._closed:
                raise Closed("await: the node is closed")
            watch = self._watches.get(loop)
            if watch is None:
                watch = self._watches[loop] = _LoopWatch(loop, self._bell)
        waiter = (happened, loop.create_future())
        watch.add(waiter)
        try:
            await waiter[1]
        finally:
            watch.discard(waiter)
            self._close_if_idle(loop, watch)

    def close(self) -> None:
        """Let every loop look once more, and release the bell. Idempotent.

        All handles have had their last event by now, so nobody is left waiting.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.close(self._bell)
            for loop, watch in self._watches.items():
                with contextlib.suppress(RuntimeError):  # that loop is closed: nobody awaits in it
                    loop.call_soon_threadsafe(watch.look)

    def _close_if_idle(self, loop: asyncio.AbstractEventLoop, watch: _LoopWatch) -> None:
        # A watch is used by its loop's thread only, so it cannot gain a waiter in between.
        if watch.is_idle():
            with self._lock:
                self._watches.pop(loop, None)
            watch.close()


class _LoopWatch:
    """One loop's view of the bell. Used in that loop's thread only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, bell: int) -> None:
        self._loop = loop
        self._waiters: dict[int, _Waiter] = {}
        try:
            self._epoll = select.epoll()
            self._epoll.register(bell, select.EPOLLIN | select.EPOLLET)
        except OSError as error:
            raise OutOfMemory(f"await: no epoll instance: {error.strerror}") from None
        loop.add_reader(self._epoll.fileno(), self._on_ring)

    def add(self, waiter: _Waiter) -> None:
        self._waiters[id(waiter)] = waiter
        self.look()  # it may have happened before the bell was watched

    def discard(self, waiter: _Waiter) -> None:
        self._waiters.pop(id(waiter), None)

    def is_idle(self) -> bool:
        return not self._waiters

    def look(self) -> None:
        for happened, future in self._waiters.values():
            if not future.done() and happened():
                future.set_result(None)

    def close(self) -> None:
        if not self._epoll.closed:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()

    def _on_ring(self) -> None:
        self._epoll.poll(0)  # consumes the edge; before the look, so that a later ring counts again
        self.look()
