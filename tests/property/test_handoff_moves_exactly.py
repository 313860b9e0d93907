"""Any two layouts of the same cache, any block tables: a handoff moves exactly what the reference moves.

Each case is a handoff between two processes. Whole memories are compared with a copy made one
token at a time in NumPy, so a byte written outside the target's blocks is found as well.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import hypothesis
import numpy as np
from helpers.patterns import APART_AXES, FUSED_AXES, Geometry, Placement, Request, blocks_for, scattered
from helpers.processes import Pair
from hypothesis import strategies as st

#: Handoffs a lane in the short form, which `make test` runs; five lanes make at least 300 cases.
CASES_PER_LANE = int(os.environ.get("KVLINK_PROPERTY_CASES", "66"))
#: A pair of layouts costs two nodes and a connection, so several handoffs share it.
REQUESTS_PER_LAYOUT = 2

BLOCK_TOKENS = (4, 1, 2, 3, 8, 16)
DTYPES = ("uint8", "float16", "float32", "float64")


@dataclass(frozen=True)
class Case:
    """Two layouts of one cache, and handoffs one after the other between them."""

    seed: int
    geometry: Geometry
    source: Placement
    target: Placement
    requests: tuple[Request, ...]


@st.composite
def placements(draw: st.DrawFn, geometry: Geometry, memory: str, block_tokens: int) -> Placement:
    """Any way to lay the cache out: axes in any order, K and V fused or apart, gaps, padding, slices."""
    axes = tuple(draw(st.permutations(draw(st.sampled_from((FUSED_AXES, APART_AXES))))))
    return Placement(
        num_blocks=draw(st.integers(6, 13)),
        block_tokens=block_tokens,
        axes=axes,
        layer_order=tuple(draw(st.permutations(range(len(geometry.layers))))),
        interleaved=draw(st.booleans()),
        layer_position=draw(st.integers(0, len(axes))),
        padding=tuple(draw(st.lists(st.sampled_from((0, 0, 0, 1, 3)), min_size=6, max_size=6))),
        gap_elements=draw(st.integers(1, 40)),
        memory=memory,
    )


@st.composite
def requests(draw: st.DrawFn, source: Placement, target: Placement) -> Request:
    """A handoff whose length, prefix and tables sit on and next to the edges of blocks."""
    block_tokens = draw(st.sampled_from((source.block_tokens, target.block_tokens)))
    most_tokens = min(side.num_blocks * side.block_tokens for side in (source, target))
    whole = draw(st.integers(1, max(1, most_tokens // block_tokens - 1))) * block_tokens
    lengths = (whole + 1, whole, whole - 1, block_tokens + 1, block_tokens, block_tokens - 1, 1, 0)
    num_tokens = min(most_tokens, draw(st.sampled_from(lengths)))
    edges = (0, 0, 0, 1, block_tokens, block_tokens + 1, num_tokens - 1, num_tokens)
    skip_tokens = min(num_tokens, max(0, draw(st.sampled_from(edges))))

    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    source_blocks = list(scattered(rng, source.num_blocks, blocks_for(num_tokens, source.block_tokens)))
    target_blocks = list(scattered(rng, target.num_blocks, blocks_for(num_tokens, target.block_tokens)))
    unwanted = rng.random(len(target_blocks)) < draw(st.sampled_from((0.0, 0.0, 0.3, 0.8)))
    target_blocks = [-1 if hole else block for block, hole in zip(target_blocks, unwanted, strict=True)]
    needed = {
        token // source.block_tokens
        for token in range(skip_tokens, num_tokens)
        if target_blocks[token // target.block_tokens] >= 0
    }
    for index in range(len(source_blocks)):  # a source may have holes where nobody asks for anything
        if index not in needed and rng.random() < 0.5:
            source_blocks[index] = -1
    return Request(
        source_blocks=tuple(source_blocks),
        target_blocks=tuple(target_blocks),
        num_tokens=num_tokens,
        skip_tokens=skip_tokens,
    )


@st.composite
def cases(draw: st.DrawFn, memories: tuple[str, ...]) -> Case:
    """Everything that one example needs."""
    geometry = Geometry(
        layers=tuple(f"layers.{index}" for index in range(draw(st.integers(1, 3)))),
        heads=draw(st.integers(1, 4)),
        head_dim=draw(st.sampled_from((1, 2, 5, 8, 16))),
        dtype=draw(st.sampled_from(DTYPES)),
    )
    block_tokens = draw(st.sampled_from(BLOCK_TOKENS))
    others = draw(st.sampled_from((block_tokens, block_tokens, *BLOCK_TOKENS)))
    source = draw(placements(geometry, draw(st.sampled_from(memories)), block_tokens))
    target = draw(placements(geometry, draw(st.sampled_from(("pool", "numpy"))), others))
    drawn = tuple(draw(requests(source, target)) for _ in range(REQUESTS_PER_LAYOUT))
    return Case(draw(st.integers(0, 2**31 - 1)), geometry, source, target, drawn)


def test_a_handoff_moves_exactly_what_the_reference_moves(pair: Pair) -> None:
    memories = ("pool",) if pair.lane.lane == "mapped" else ("pool", "numpy")
    done = 0

    @hypothesis.seed(int(os.environ.get("KVLINK_PROPERTY_SEED", "20")))
    @hypothesis.settings(
        max_examples=-(-CASES_PER_LANE // REQUESTS_PER_LAYOUT),
        database=None,
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=cases(memories))
    def run(case: Case) -> None:
        nonlocal done
        hypothesis.note(f"memory seed {case.seed}")
        pair.open(case.geometry, source=case.source, target=case.target, seed=case.seed)
        for request in case.requests:
            taken = pair.hand_over(request)
            assert taken.lane == pair.lane.lane
            done += 1
        assert not any(pair.holds())

    run()
    print(f"{pair.lane.id}: {done} handoffs, KVLINK_PROPERTY_SEED={os.environ.get('KVLINK_PROPERTY_SEED', '20')}")
    assert done >= CASES_PER_LANE
