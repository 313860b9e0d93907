"""Stage 4: what an engine pays for kvlink in each of its steps, with a hundred handoffs alive."""

import numpy as np
import pytest

import kvlink
from kvlink.commands import Cancel, Offer

BLOCKS = 256


@pytest.fixture
def side():
    """A node with a hundred live offers, and the mint of their tickets."""
    tensor = np.zeros((2, BLOCKS, 4, 2, 8), dtype="float32")
    cache = kvlink.KVCache.from_tensors({"layer": tensor}, axes="kv block token head dim", block_tokens=4)
    with kvlink.Node(cache, name="engine", copy_threads=1) as node:
        mint = kvlink.TicketMint([node.descriptor])
        node.submit([Offer(blocks=[block], ticket=mint.offer(num_tokens=4, ttl_s=300)) for block in range(100)])
        yield node, mint


def test_a_step_in_which_nothing_happens(benchmark, side):
    node, _ = side
    benchmark(node.completions)


def test_a_step_that_submits_two_offers_and_cancels_two(benchmark, side):
    node, mint = side
    before = []

    def commands():
        offers = [Offer(blocks=[block], ticket=mint.offer(num_tokens=4)) for block in (200, 201)]
        batch = [*offers, *(Cancel(one.id) for one in before)]
        before[:] = offers
        return (batch,), {}

    def step(batch):
        node.submit(batch)
        node.completions()

    benchmark.pedantic(step, setup=commands, rounds=200, warmup_rounds=5)
