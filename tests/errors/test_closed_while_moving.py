"""A node that is closed, with no time left to wait, in the middle of a pull: its blocks are free when it says so."""

from __future__ import annotations

import threading

import pytest
from helpers.markers import LANES, Lane, skip_unless_served
from helpers.tagged_pool import TaggedPool

from kvlink import errors

BLOCKS = 24
BLOCK_BYTES = 2 << 20  # 50 MB: tens of milliseconds
TRIES = 4
RELEASED_S = 10.0
#: What the engine puts at the start of each block when it has them back.
WORDS, AGAIN = 16, 0xDEAD
PULLED = range(1, BLOCKS)


@pytest.mark.parametrize("lane", [lane for lane in LANES if not lane.env], ids=lambda lane: lane.id)
def test_nothing_is_written_after_the_release_of_a_pull_whose_node_was_closed(lane: Lane) -> None:
    """UCX finishes gets that it has begun even while its worker is being torn down."""
    skip_unless_served(lane)
    options = {"blocks": BLOCKS, "block_bytes": BLOCK_BYTES, "memory": lane.memory, "copy_threads": 1}
    source = TaggedPool(name="source", **options)
    caught = 0
    for _ in range(TRIES):
        target = TaggedPool(name="target", **options)
        offer = source.node.offer(blocks=[0], num_tokens=1)
        target.node.pull(offer.ticket, blocks=[0], require=lane.lane).wait(timeout_s=RELEASED_S)
        offer = source.node.offer(blocks=list(PULLED), num_tokens=len(PULLED))
        pull = target.node.pull(offer.ticket, blocks=list(PULLED), require=lane.lane)

        def refill(pull: object = pull, target: TaggedPool = target) -> None:
            assert pull.wait_released(timeout_s=RELEASED_S)
            target.blocks[1:, :WORDS] = AGAIN  # fast: a late byte lands within the next millisecond

        engine = threading.Thread(target=refill)
        engine.start()
        while pull.state in ("connecting", "claiming", "waiting"):
            pass
        target.node.close(deadline_s=0.0)
        engine.join(timeout=2 * RELEASED_S)
        caught += isinstance(pull.error, errors.Closed)
        assert (target.blocks[1:, :WORDS] == AGAIN).all(), "bytes landed in blocks that were used again"
        offer.cancel()
        assert offer.wait_released(timeout_s=RELEASED_S)
    source.close()
    assert caught, "every pull was over before its node was closed"
