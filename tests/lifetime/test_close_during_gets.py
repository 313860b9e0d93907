"""A node that closes while UCX still has gets to do: they end before any block is called released."""

from __future__ import annotations

import threading

import pytest
from helpers.markers import LANES, skip_unless_served
from helpers.tagged_pool import TaggedPool

from kvlink import errors

BLOCKS = 32
LANE = next(lane for lane in LANES if lane.lane == "get")


@pytest.mark.parametrize("attempt", range(5))
def test_no_get_lands_in_a_block_that_a_close_has_released(attempt: int) -> None:
    skip_unless_served(LANE)
    size = {"blocks": BLOCKS, "block_bytes": 1 << 20, "memory": LANE.memory, "copy_threads": 1}
    source, target = TaggedPool(name="source", **size), TaggedPool(name="target", **size)
    everything = list(range(BLOCKS))
    source.fill(everything, first_tag=500)
    offer = source.node.offer(blocks=everything, num_tokens=BLOCKS, ttl_s=30)
    pull = target.node.pull(offer.ticket, blocks=everything, deadline_s=20, require="get")
    reused = threading.Event()

    def reuse() -> None:
        if pull.wait_released(timeout_s=20):
            target.fill(everything, first_tag=1000)
            reused.set()

    reusing = threading.Thread(target=reuse, daemon=True)
    reusing.start()
    while not target.touched(everything):
        assert not pull.wait_released(timeout_s=0)
    target.node.close(deadline_s=0)
    assert reused.wait(timeout=20)
    reusing.join(timeout=5)
    with pytest.raises(errors.Closed):
        pull.poll()
    target.check()
    source.close()
