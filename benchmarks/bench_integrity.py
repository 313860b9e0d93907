"""Integrity: checksums of scattered blocks on one thread, next to a memcpy of the same blocks."""

import numpy as np
import pytest

import kvlink
from kvlink import _native
from kvlink.plan import compile_template

BLOCKS, TOKENS, HEADS, DIM = 512, 16, 8, 128  # of bfloat16: 32 KiB a run, 32 MiB in all
AXES = {
    "nhd": "kv block token head dim",  # a cell is 16 runs of 256 bytes
    "hnd": "kv block head token dim",  # a cell is one run of 4 KiB
    "dim-first": "kv block head dim token",  # a cell is 2,048 elements, each on its own
}
SIZES = {"kv": 2, "block": BLOCKS, "token": TOKENS, "head": HEADS, "dim": DIM}


def pool(axes):
    tensor = np.random.default_rng(1).integers(0, 1 << 16, [SIZES[axis] for axis in axes.split()], np.uint16)
    return tensor, kvlink.KVCache.from_tensors({"layer": tensor}, axes=axes, block_tokens=TOKENS).layout


@pytest.mark.parametrize("algorithm", ["crc32c", "xxh3"])
@pytest.mark.parametrize("axes", AXES.values(), ids=AXES.keys())
def test_summing_scattered_blocks(benchmark, axes, algorithm):
    tensor, layout = pool(axes)
    table = np.random.default_rng(2).permutation(BLOCKS).astype(np.int32)
    plan = _native.Plan(compile_template(layout, layout), [table], [table], end_token=BLOCKS * TOKENS)
    memory = [tensor.reshape(-1).view(np.uint8)]
    sums = benchmark(_native.sum_plan, plan, memory, target=False, algorithm=algorithm, threads=1)
    assert len(sums) == 2 * BLOCKS * HEADS * {"crc32c": 4, "xxh3": 8}[algorithm]


def test_memcpy_of_the_same_blocks(benchmark):
    tensor, _ = pool(AXES["nhd"])
    source = tensor.reshape(-1).view(np.uint8)
    target = np.ones_like(source)
    run_bytes = TOKENS * HEADS * DIM * 2
    offsets = [np.random.default_rng(seed).permutation(2 * BLOCKS).astype(np.uint64) * run_bytes for seed in (3, 4)]
    seconds = benchmark(
        _native.memcpy_seconds,
        source=source,
        target=target,
        source_offsets=offsets[0],
        target_offsets=offsets[1],
        run_bytes=run_bytes,
    )
    assert seconds > 0
