"""Stage 2: from block tables to copies, at the size of a long request of a large model. No bytes move."""

import numpy as np
import pytest

import kvlink
from kvlink import _native
from kvlink.plan import compile_template

LAYERS = 32
BLOCKS = 4096
RUNS = LAYERS * 2 * BLOCKS


@pytest.fixture(scope="module")
def layouts():
    """Two caches of one model: 32 layers, 4,096 blocks of 16 tokens. The memory is never touched."""

    def layout():
        tensors = {f"layers.{layer}": np.zeros((2, BLOCKS, 16, 1, 64), np.uint8) for layer in range(LAYERS)}
        return kvlink.KVCache.from_tensors(tensors, axes="kv block token head dim", block_tokens=16)

    return layout(), layout()


@pytest.fixture(scope="module")
def tables():
    """Every block of the pool, in another random order on each side."""
    rng = np.random.default_rng(1)
    return [rng.permutation(BLOCKS).astype(np.int32) for _ in range(2)]


def make_plan(layouts, tables):
    template = compile_template(layouts[0].layout, layouts[1].layout)
    return _native.Plan(template, [tables[0]], [tables[1]], end_token=BLOCKS * 16)


def test_compiling_a_template_once_per_peer(benchmark, layouts):
    benchmark(compile_template, layouts[0].layout, layouts[1].layout)


def test_planning_one_request(benchmark, layouts, tables):
    template = compile_template(layouts[0].layout, layouts[1].layout)
    plan = benchmark(_native.Plan, template, [tables[0]], [tables[1]], end_token=BLOCKS * 16)
    assert plan.total_bytes == RUNS * 1024


def test_visiting_the_copies_of_scattered_blocks(benchmark, layouts, tables):
    plan = make_plan(layouts, tables)
    copies, runs, _ = benchmark(plan.count_copies)
    assert 0.99 * RUNS < copies <= runs <= RUNS  # a few random neighbours merge


def test_visiting_the_copies_of_contiguous_blocks(benchmark, layouts):
    ordered = np.arange(BLOCKS, dtype=np.int32)
    plan = make_plan(layouts, [ordered, ordered])
    copies, _, _ = benchmark(plan.count_copies)
    assert copies <= 2 * LAYERS
