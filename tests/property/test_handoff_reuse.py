"""Blocks are reused the moment they are released, in a pool so small that every round hits them again."""

from __future__ import annotations

import os

import numpy as np
from helpers.patterns import Geometry, Placement, Request, fill_random, scattered
from helpers.processes import Pair

ROUNDS = int(os.environ.get("KVLINK_REUSE_ROUNDS", "20"))
SEED = int(os.environ.get("KVLINK_PROPERTY_SEED", "20"))
BLOCKS = 6


def refill(pair: Pair, seed: int) -> None:
    """Write new bytes over all blocks of both sides, as engines do with blocks that are theirs again."""
    pair.source.call("fill", seed=2 * seed)
    pair.target.call("fill", seed=2 * seed + 1)
    fill_random(pair.expected_source.flat, seed=2 * seed)
    fill_random(pair.expected_target.flat, seed=2 * seed + 1)


def test_a_handoff_cancelled_at_any_moment_leaves_nothing_that_writes_or_reads_reused_blocks(pair: Pair) -> None:
    """After `released` on both sides, neither side's new bytes are disturbed and the next handoff is exact."""
    rng = np.random.default_rng(SEED)
    placement = Placement(num_blocks=BLOCKS, memory=pair.lane.memory)
    pair.open(Geometry(head_dim=4096), source=placement, target=placement)
    outcomes = []
    for number in range(ROUNDS):
        source_blocks, target_blocks = scattered(rng, BLOCKS, 5), scattered(rng, BLOCKS, 5)
        request = Request(source_blocks=source_blocks, target_blocks=target_blocks, num_tokens=20)
        offered, ticket = pair.offer(request)
        who = rng.choice(["target", "target", "source", "both", "nobody"])
        after_s = float(rng.uniform(0, 0.001))
        pulled = pair.target.call(
            "pull_and_cancel" if who in ("target", "both") else "pull",
            *(ticket, list(target_blocks)),
            require=pair.lane.lane,
            **({"after_s": after_s} if who in ("target", "both") else {}),
        )
        if who in ("source", "both"):
            pair.source.call("cancel", offered)
        taken = pair.target.call("wait_released", pulled)
        if who == "target" and taken.error:
            pair.source.call("cancel", offered)
        pair.source.call("wait_released", offered)
        outcomes.append(taken.error)

        if taken.error is None:
            pair.expect(request)
            pair.verify()
        refill(pair, number + 10)
        pair.verify()
    print(f"{pair.lane.id}: seed {SEED}, {outcomes.count(None)} of {ROUNDS} succeeded")
    assert None in outcomes
    assert set(outcomes) <= {None, "Cancelled", "UnknownHandoff"}
    assert not any(pair.holds())
