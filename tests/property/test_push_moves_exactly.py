"""Any two layouts, and layers that become ready in any order: a push moves exactly what the reference moves.

`KVLINK_PROPERTY_SEED` says which cases, `KVLINK_PUSH_CASES` how many a lane.
"""

from __future__ import annotations

import os
from typing import Any

import hypothesis
import numpy as np
from helpers.patterns import Request, blocks_for
from helpers.processes import Pair
from helpers.soak import rounds
from property.test_handoff_moves_exactly import Case, cases

import kvlink

#: Pushes a lane.
CASES_PER_LANE = int(os.environ.get("KVLINK_PUSH_CASES", str(rounds(10, 200))))
SEED = int(os.environ.get("KVLINK_PROPERTY_SEED", "20"))
PIECEWISE = kvlink.Limits(push_at_once_tokens=0)

Said = list[tuple[str, dict[str, Any]]]


def what_is_said(case: Case, request: Request, rng: np.random.Generator) -> tuple[int, Said]:
    """How many blocks there are at first, and what is said then: adds and pieces in any order, the rest with commit."""
    tokens, size = request.num_tokens, case.source.block_tokens
    cuts = sorted({0, tokens, *(int(cut) for cut in rng.integers(0, tokens + 1, int(rng.integers(0, 5))))})
    cells = [
        (first, end, layer) for first, end in zip(cuts[:-1], cuts[1:], strict=True) for layer in case.geometry.layers
    ]
    rng.shuffle(cells)
    cells = cells[: len(cells) - int(rng.choice([0, 0, 1, len(cells)]))]
    blocks = request.source_blocks
    there = begun_with = int(rng.integers(0, len(blocks) + 1))
    said: Said = []
    while cells:
        first, end, layer = (int(cells[-1][0]), int(cells[-1][1]), str(cells[-1][2]))
        cells.pop()
        layers = [layer]
        if rng.random() < 0.5:  # together with others that are for the same tokens
            alike = [cell for cell in cells if (int(cell[0]), int(cell[1])) == (first, end)]
            layers += [str(cell[2]) for cell in alike]
            cells = [cell for cell in cells if cell not in alike]
        needed = blocks_for(end, size)
        if needed > there:
            upto = int(rng.integers(needed, len(blocks) + 1))
            said.append(("add", {"blocks": list(blocks[there:upto])}))
            there = upto
        said.append(("ready", {"layers": layers, "tokens": range(first, end)}))
    if there < len(blocks):
        said.append(("add", {"blocks": list(blocks[there:])}))
    said.append(("commit", {"payload": bytes(rng.integers(0, 256, int(rng.integers(0, 9)), dtype=np.uint8))}))
    return begun_with, said


def push_over(pair: Pair, case: Case, request: Request, rng: np.random.Generator) -> None:
    begun_with, said = what_is_said(case, request, rng)
    hypothesis.note(f"{begun_with} blocks at first, then {said}")
    reserved, ticket = pair.reserve(request)
    pushed = pair.source.call("push", ticket, list(request.source_blocks[:begun_with]))
    at = 0
    while at < len(said):  # in several calls, so that pieces come one by one and together
        upto = at + int(rng.integers(1, 4))
        pair.source.call("tell", pushed, *said[at:upto])
        at = upto
    taken = pair.target.call("wait", reserved)
    pair.expect(request)
    pair.target.call("wait_released", reserved)
    pair.source.call("wait", pushed)
    pair.source.call("wait_released", pushed)
    assert (taken.lane in ("", pair.lane.lane), taken.payload) == (True, said[-1][1]["payload"])
    pair.verify()


def test_a_push_moves_exactly_what_the_reference_moves(pair: Pair) -> None:
    memories = ("pool",) if pair.lane.lane == "mapped" else ("pool", "numpy")
    done = 0

    @hypothesis.seed(SEED)
    @hypothesis.settings(
        max_examples=-(-CASES_PER_LANE // 2),
        database=None,
        deadline=None,
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=cases(memories))
    def run(case: Case) -> None:
        nonlocal done
        hypothesis.note(f"memory seed {case.seed}")
        rng = np.random.default_rng(case.seed)
        integrity = {"integrity": "xxh3"} if rng.random() < 0.3 else {}
        pair.open(case.geometry, source=case.source, target=case.target, seed=case.seed, limits=PIECEWISE, **integrity)
        for request in case.requests:
            push_over(pair, case, request, rng)
            done += 1
        assert not any(pair.holds())

    run()
    print(f"{pair.lane.id}: {done} pushes, KVLINK_PROPERTY_SEED={SEED}")
    assert done >= CASES_PER_LANE
