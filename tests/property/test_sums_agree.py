"""Both sides of any plan have the same sums of the same cells, and a bit that turns over is found in its cell.

Fleets, requests and the reference are those of test_geometries.py; sums are taken of the memory of either side.
"""

from __future__ import annotations

import numpy as np
import pytest
from helpers.element_tags import fill_sources, memory_of, move, plan_of
from helpers.fleet_draws import draw_fleets, draw_request
from helpers.fleets import Fleet, Rank, build, build_one
from helpers.soak import SEED, rounds

from kvlink import _native
from kvlink.errors import LayoutMismatch
from kvlink.plan import as_delivered, compile_conversion, select

CASES = rounds(90, 3000)


def target_byte(plan: _native.Plan, at: int) -> tuple[int, int]:
    """Region and offset of one byte of the stream at the target."""
    row = plan.copies(at, at + 1).tolist()[0]
    return row[1], row[3]


def check_plan(
    template: object, plan: _native.Plan, source: Rank, intos: list[np.ndarray], rng: np.random.Generator
) -> int:
    move(template, plan, source, intos, way="direct", cuts=[])
    algorithm = str(rng.choice(["crc32c", "xxh3"]))
    width = {"crc32c": 4, "xxh3": 8}[algorithm]

    def sums(memory: list[np.ndarray], *, target: bool, threads: int = 1) -> np.ndarray:
        options = {"target": target, "algorithm": algorithm, "threads": threads}
        return np.frombuffer(_native.sum_plan(plan, memory, **options), f"<u{width}")

    of_source = sums(memory_of(source.cache), target=False)
    assert (of_source == sums(intos, target=True, threads=2)).all()
    for at in rng.integers(0, plan.total_bytes, 3).tolist():
        region, offset = target_byte(plan, at)
        intos[region][offset] ^= 1
        wrong = np.flatnonzero(of_source != sums(intos, target=True))
        intos[region][offset] ^= 1
        assert len(wrong) == 1
        [found] = _native.describe_cells(plan, target=True, cells=wrong.tolist())
        # What the plan itself says of that byte, in whole pairs and all heads of the op, has the cell inside.
        [around] = plan.describe(at, at + 1)
        assert found[:3] == around[:3]
        assert around[3] <= found[3] == found[4] - 1 < around[4]
        assert around[5] <= found[5] < found[6] <= around[6]
    everything = _native.describe_cells(plan, target=True, cells=list(range(len(of_source))))
    assert named(everything) == named(plan.describe(0, plan.total_bytes))
    return len(of_source)


def named(ranges: list[tuple[int, ...]]) -> set[tuple[int, ...]]:
    return {
        (*what, head, token)
        for *what, first_head, end_head, first, end in ranges
        for head in range(first_head, end_head)
        for token in range(first, end)
    }


def check_fleets(source_fleet: Fleet, target_fleet: Fleet, rng: np.random.Generator) -> int:
    """Returns how many cells were compared; none where the layouts do not fit."""
    sources, target = build(source_fleet, rng), build_one(target_fleet, rng)
    try:
        taken = select([rank.cache.layout for rank in sources], target.cache.layout, seed=1, converts=target.converts)
    except LayoutMismatch:
        return 0
    request = draw_request(sources, target, rng)
    fill_sources(sources, request)
    cells = 0
    for source, layout, tables in zip(sources, taken, request.source_tables, strict=True):
        delivered = as_delivered(source.cache.layout, layout)
        template, plan = plan_of(source, delivered, request, tables)
        intos = memory_of(target.cache)
        conversion = compile_conversion(delivered, layout)
        if conversion is not None:  # What is to be converted is summed where it waits.
            plan, _ = conversion.steps(template, plan)
            intos.append(np.zeros(conversion.scratch_bytes, np.uint8))
        if plan.total_bytes:
            cells += check_plan(template, plan, source, intos, rng)
    return cells


@pytest.mark.slow
def test_unlike_layouts_agree_on_every_sum_and_find_a_bit_that_turned_over():
    cells = compared = 0
    for number in range(CASES):
        rng = np.random.default_rng([SEED, number])
        try:
            found = check_fleets(*draw_fleets(rng), rng)
        except BaseException:
            print(f"KVLINK_PROPERTY_SEED={SEED}, case {number}")
            raise
        cells += found
        compared += found > 0
    print(f"{cells} cells in {compared} handoffs")
    assert compared > CASES // 3
