"""Whatever the order in which minted tickets are offered, ended and offered again: each is good for one offer."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest
from helpers.soak import SEED
from helpers.tagged_pool import TaggedPool
from hypothesis import strategies as st

import kvlink
from kvlink import errors

TICKETS = 200
#: Which mint, which of its tickets, and whether the offer is ended at once.
STEPS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, TICKETS - 1), st.booleans()), min_size=1, max_size=60)


@pytest.fixture
def pool() -> Iterator[TaggedPool]:
    found = TaggedPool(name="source", blocks=1, block_bytes=64, copy_threads=1)
    yield found
    found.close()


def test_each_ticket_is_good_for_one_offer(pool: TaggedPool) -> None:
    @hypothesis.seed(SEED)
    @hypothesis.settings(max_examples=40, database=None, deadline=None)
    @hypothesis.given(steps=STEPS)
    def run(steps: list[tuple[int, int, bool]]) -> None:
        mints = [kvlink.TicketMint([pool.node.descriptor]) for _ in range(3)]
        tickets = [[mint.offer(num_tokens=1) for _ in range(TICKETS)] for mint in mints]
        offered: set[tuple[int, int]] = set()
        live = []
        for mint, number, end in steps:
            offer = pool.node.offer(blocks=[0], ticket=tickets[mint][number])
            if (mint, number) in offered:
                with pytest.raises(errors.InvalidArgument, match="offered here before"):
                    offer.wait(timeout_s=10)
                assert offer.wait_released(timeout_s=10)
                continue
            offered.add((mint, number))
            live.append(offer)
            if end:
                offer.cancel()
                assert offer.wait_released(timeout_s=10)
        for offer in live:
            offer.cancel()
            assert offer.wait_released(timeout_s=10)
            assert isinstance(offer.error, errors.Cancelled)
        assert not any(pool.node.holds().values())

    run()
