"""Stage 3: one handoff of 32 MiB in scattered blocks, on each lane of one host. `kvlink bench transfer` says more."""

import pytest

import kvlink
from kvlink.bench.scattered import Geometry, Pool, permutation
from kvlink.bench.source import SEED
from kvlink.testing import Worker


@pytest.mark.parametrize("block_bytes", [4096, 65536], ids=["4KiB", "64KiB"])
@pytest.mark.parametrize("lane", ["mapped", "vectored", "get", "staged"])
def test_moving_scattered_blocks(benchmark, lane, block_bytes):
    geometry = Geometry(block_bytes=block_bytes, total_bytes=32 << 20)
    memory = "kvlink" if lane == "mapped" else "foreign"
    pool = Pool(geometry, memory=memory)
    tables = permutation(geometry, seed=1), permutation(geometry, seed=2)
    arguments = {"geometry": geometry, "memory": memory, "threads": 1}
    with (
        Worker("kvlink.bench.source:BenchSource", arguments=arguments) as source,
        kvlink.Node(pool.cache(), name="target", copy_threads=1) as node,
    ):

        def offered():
            return (source.call("offer", tables[0]),), {}

        def pull(ticket):
            handle = node.pull(ticket, tables[1], deadline_s=60, require=lane)
            handle.wait(timeout_s=60)

        benchmark.extra_info["bytes"] = geometry.moved_bytes
        benchmark.pedantic(pull, setup=offered, rounds=10, warmup_rounds=1)
        assert pool.holds(source_table=tables[0], target_table=tables[1], seed=SEED)
        source.call("close")
        source.close()
