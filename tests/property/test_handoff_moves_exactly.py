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
REQUESTS_PER_LAYOUT = 3

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
def placements(draw: st.DrawFn, geometry: Geometry, memory: str) -> Placement:
    """Any way to lay the cache out: axes in any order, K and V fused or apart, gaps, padding, slices."""
    axes = tuple(draw(st.permutations(draw(st.sampled_from((FUSED_AXES, APART_AXES))))))
    return Placement(
        num_blocks=draw(st.integers(6, 13)),
        axes=axes,
        layer_order=tuple(draw(st.permutations(range(len(geometry.layers))))),
        interleaved=draw(st.booleans()),
        layer_position=draw(st.integers(0, len(axes))),
        padding=tuple(draw(st.lists(st.sampled_from((0, 0, 0, 1, 3)), min_size=6, max_size=6))),
        gap_elements=draw(st.integers(1, 40)),
        memory=memory,
    )


@st.composite
def requests(draw: st.DrawFn, block_tokens: int, source: Placement, target: Placement) -> Request:
    """A handoff whose length, prefix and tables sit on and next to the edges of blocks."""
    most_blocks = min(source.num_blocks, target.num_blocks)
    whole = draw(st.integers(1, most_blocks - 1)) * block_tokens
    lengths = (whole + 1, whole, whole - 1, block_tokens + 1, block_tokens, block_tokens - 1, 1, 0)
    num_tokens = draw(st.sampled_from(lengths))
    edges = (0, 0, 0, 1, block_tokens, block_tokens + 1, num_tokens - 1, num_tokens)
    skip_tokens = min(num_tokens, max(0, draw(st.sampled_from(edges))))

    count = blocks_for(num_tokens, block_tokens)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    source_blocks = scattered(rng, source.num_blocks, count)
    target_blocks = scattered(rng, target.num_blocks, count)
    unwanted = rng.random(count) < draw(st.sampled_from((0.0, 0.0, 0.3, 0.8)))
    in_prefix = (np.arange(count) + 1) * block_tokens <= skip_tokens
    not_given = (unwanted | in_prefix) & (rng.random(count) < 0.5)
    return Request(
        source_blocks=tuple(-1 if hole else block for block, hole in zip(source_blocks, not_given, strict=True)),
        target_blocks=tuple(-1 if hole else block for block, hole in zip(target_blocks, unwanted, strict=True)),
        num_tokens=num_tokens,
        skip_tokens=skip_tokens,
    )


@st.composite
def cases(draw: st.DrawFn, memories: tuple[str, ...]) -> Case:
    """Everything that one example needs."""
    geometry = Geometry(
        layers=tuple(f"layers.{index}" for index in range(draw(st.integers(1, 3)))),
        block_tokens=draw(st.sampled_from((1, 2, 3, 4, 8, 16))),
        heads=draw(st.integers(1, 4)),
        head_dim=draw(st.sampled_from((1, 2, 5, 8, 16))),
        dtype=draw(st.sampled_from(DTYPES)),
    )
    source = draw(placements(geometry, draw(st.sampled_from(memories))))
    target = draw(placements(geometry, draw(st.sampled_from(("pool", "numpy")))))
    request = requests(geometry.block_tokens, source, target)
    drawn = tuple(draw(request) for _ in range(REQUESTS_PER_LAYOUT))
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
