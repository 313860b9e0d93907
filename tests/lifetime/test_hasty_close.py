"""A node that is closed without any time to wait still ends all of its threads, at once."""

from __future__ import annotations

import threading

from helpers.processes import wait_until
from helpers.tagged_pool import TaggedPool

NODES = 10


def test_closing_with_no_time_to_wait_leaves_no_thread_behind() -> None:
    before = set(threading.enumerate())
    for number in range(NODES):
        TaggedPool(name=f"node-{number}", blocks=1, block_bytes=64).node.close(deadline_s=0.0)

    def left() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread not in before]

    wait_until(lambda: not left(), timeout_s=5, what=lambda: f"all threads end; there still are {left()}")
