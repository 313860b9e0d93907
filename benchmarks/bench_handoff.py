"""Stage 4: what a handoff costs apart from its bytes, and how long a node takes to come up."""

import numpy as np
import pytest

import kvlink
from kvlink.bench.scattered import Geometry, Pool
from kvlink.testing import Worker

GEOMETRY = Geometry(block_bytes=16384, total_bytes=1 << 20)


@pytest.fixture(scope="module")
def pair():
    """A source process, and a node of this one that is connected to it."""
    arguments = {"geometry": GEOMETRY, "memory": "kvlink", "threads": 1}
    pool = Pool(GEOMETRY, memory="kvlink")
    with (
        Worker("kvlink.bench.source:BenchSource", arguments=arguments) as source,
        kvlink.Node(pool.cache(), name="target", copy_threads=1) as node,
    ):
        yield source, node
        source.call("close")
        source.close()


def test_handing_over_a_few_blocks(benchmark, pair):
    """From pull to VALID, with the connection in place: 64 runs of 16 KiB."""
    source, node = pair
    table = np.arange(GEOMETRY.entries, dtype=np.int32)

    def pull(ticket):
        node.pull(ticket, table, deadline_s=10).wait(timeout_s=10)

    benchmark.pedantic(pull, setup=lambda: ((source.call("offer", table),), {}), rounds=50, warmup_rounds=2)


def test_making_and_cancelling_an_offer(benchmark, pair):
    _, node = pair

    def offer():
        node.offer(blocks=[0], num_tokens=16, ttl_s=10).cancel()

    benchmark.pedantic(offer, rounds=50)


def test_starting_and_closing_a_node(benchmark):
    cache = Pool(GEOMETRY, memory="kvlink").cache()
    benchmark.pedantic(lambda: kvlink.Node(cache, name="short").close(), rounds=10, warmup_rounds=1)
