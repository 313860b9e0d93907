"""Handoffs can be awaited in any number of loops and tasks, and every one of them wakes up."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator

import pytest

from kvlink import errors
from kvlink.handoff.awaiting import Awaiters


class Bell:
    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.awaiters = Awaiters(self.fd)

    def ring(self) -> None:
        os.eventfd_write(self.fd, 1)


@pytest.fixture
def bell() -> Iterator[Bell]:
    made = Bell()
    yield made
    made.awaiters.close()
    os.close(made.fd)


async def test_what_has_happened_needs_no_ring(bell: Bell) -> None:
    await asyncio.wait_for(bell.awaiters.until(lambda: True), 5)


async def test_a_ring_before_and_a_ring_after_both_count(bell: Bell) -> None:
    for _ in range(3):
        happened = threading.Event()
        bell.ring()
        waiting = asyncio.ensure_future(bell.awaiters.until(happened.is_set))
        await asyncio.sleep(0)
        happened.set()
        bell.ring()
        await asyncio.wait_for(waiting, 5)


async def test_a_ring_for_something_else_wakes_nobody(bell: Bell) -> None:
    happened = threading.Event()
    waiting = asyncio.ensure_future(bell.awaiters.until(happened.is_set))
    for _ in range(5):
        bell.ring()
        await asyncio.sleep(0.001)  # the watch has every chance to be woken by mistake
    assert not waiting.done()
    happened.set()
    bell.ring()
    await asyncio.wait_for(waiting, 5)


def test_many_loops_in_many_threads_steal_no_wakeup_from_each_other(bell: Bell) -> None:
    rounds, loops = 200, 6
    turn = [threading.Event() for _ in range(rounds)]
    arrived = threading.Semaphore(0)

    async def main() -> None:
        for event in turn:
            waiting = asyncio.ensure_future(bell.awaiters.until(event.is_set))
            await asyncio.sleep(0)
            arrived.release()
            await asyncio.wait_for(waiting, 20)

    threads = [threading.Thread(target=lambda: asyncio.run(main())) for _ in range(loops)]
    for thread in threads:
        thread.start()
    for event in turn:
        for _ in range(loops):
            assert arrived.acquire(timeout=20)
        event.set()
        bell.ring()
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive()


async def test_many_tasks_wait_for_one_event_without_a_thread(bell: Bell) -> None:
    happened = threading.Event()
    before = threading.active_count()
    waiting = [asyncio.ensure_future(bell.awaiters.until(happened.is_set)) for _ in range(300)]
    await asyncio.sleep(0)
    assert threading.active_count() == before
    happened.set()
    bell.ring()
    await asyncio.wait_for(asyncio.gather(*waiting), 5)


async def test_a_cancelled_task_leaves_nothing_behind(bell: Bell) -> None:
    before = len(os.listdir("/proc/self/fd"))
    waiting = asyncio.ensure_future(bell.awaiters.until(lambda: False))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert len(os.listdir("/proc/self/fd")) == before


async def test_an_idle_watch_does_not_keep_the_loop_busy(bell: Bell) -> None:
    asked = 0

    def happened() -> bool:
        nonlocal asked
        asked += 1
        return False

    waiting = asyncio.ensure_future(bell.awaiters.until(happened))
    bell.ring()
    await asyncio.sleep(0.05)  # what is measured is time in which nothing happens
    assert asked <= 5
    waiting.cancel()


async def test_closing_lets_everyone_look_once_more(bell: Bell) -> None:
    over = threading.Event()
    waiting = asyncio.ensure_future(bell.awaiters.until(over.is_set))
    await asyncio.sleep(0)
    over.set()
    threading.Thread(target=bell.awaiters.close).start()
    await asyncio.wait_for(waiting, 5)
    with pytest.raises(errors.Closed):
        await bell.awaiters.until(lambda: False)
