"""Plan: block tables become few copies, and tables that would corrupt the target are refused."""

import numpy as np
import pytest

from kvlink._native import Plan
from kvlink.errors import InvalidArgument, NotOffered
from kvlink.layout import KVCache
from kvlink.plan import compile_template

NHD = "kv block token head dim"
HND = "kv block head token dim"
ROW = 16  # bytes of one token in the caches below: 1 head of 8 float16


def template(
    source_axes=NHD, target_axes=NHD, *, blocks=6, source_tokens=4, target_tokens=4, heads=1, target_heads=None
):
    def layout(axes, tokens, held):
        sizes = {"kv": 2, "block": blocks, "token": tokens, "head": len(held), "dim": 8}
        memory = np.zeros([sizes[axis] for axis in axes.split()], np.float16)
        return KVCache.from_tensors(
            {"l0": memory}, axes=axes, block_tokens=tokens, heads=held, total_kv_heads=heads
        ).layout

    return compile_template(
        layout(source_axes, source_tokens, range(heads)),
        layout(target_axes, target_tokens, target_heads or range(heads)),
    )


def table(*blocks):
    return [np.array(blocks, np.int32)]


def rows(plan, *bounds):
    """Source offset, target offset, run bytes, inner, outer of each copy."""
    return [tuple(row[2:7]) for row in plan.copies(*bounds).tolist()]


def test_scattered_blocks_are_one_run_each_in_the_order_of_the_tokens():
    plan = Plan(template(), table(3, 0, 5), table(1, 4, 0), end_token=12)
    assert rows(plan)[:3] == [(192, 64, 64, 1, 1), (0, 256, 64, 1, 1), (320, 0, 64, 1, 1)]
    assert plan.count_copies()[:2] == (6, 6)


def test_blocks_that_are_neighbours_on_both_sides_merge():
    plan = Plan(template(), table(1, 2, 3, 5), table(2, 3, 4, 0), end_token=16)
    assert rows(plan)[:2] == [(64, 128, 192, 1, 1), (320, 0, 64, 1, 1)]
    apart = Plan(template(), table(1, 2, 3), table(4, 3, 2), end_token=12)
    assert plan.count_copies()[0] == 4
    assert apart.count_copies()[0] == 6


def test_a_last_block_that_is_not_full_merges_with_its_neighbour_and_ends_at_its_tokens():
    plan = Plan(template(), table(1, 2), table(1, 2), end_token=5)
    assert rows(plan)[0] == (64, 64, 5 * ROW, 1, 1)


def test_head_slices_stay_one_regular_grid():
    plan = Plan(template(heads=4, target_heads=range(1, 3)), table(2), table(3), end_token=4)
    k = plan.copies()[0].tolist()
    assert k[4:7] == [2 * ROW, 4, 1]
    assert k[7:9] == [4 * ROW, 2 * ROW]
    neighbours = Plan(template(heads=4, target_heads=range(1, 3)), table(2, 3), table(3, 4), end_token=8)
    assert neighbours.copies()[0, 5] == 8


def test_a_change_of_axes_is_a_grid_with_two_loops():
    plan = Plan(template(HND, NHD, heads=3), table(0), table(0), end_token=4)
    (k, v) = plan.copies().tolist()
    assert k[4:7] == [16, 3, 4]
    assert k[7:] == [64, 16, 16, 48]
    assert v[2] - k[2] == 6 * 3 * 64


def test_full_blocks_with_heads_outside_move_as_one_run():
    assert rows(Plan(template(HND, HND, heads=3), table(1), table(2), end_token=4))[0] == (192, 384, 192, 1, 1)
    partial = Plan(template(HND, HND, heads=3), table(1), table(2), end_token=2)
    assert rows(partial)[0] == (192, 384, 32, 3, 1)


def test_unlike_block_sizes_pair_the_pieces_that_both_tables_have():
    plan = Plan(template(source_tokens=4, target_tokens=3), table(1, 0), table(5, 0, 2), end_token=8)
    k = rows(plan)[:4]
    assert [copy[2] // ROW for copy in k] == [3, 1, 2, 2]
    assert [copy[0] // ROW for copy in k] == [4, 7, 0, 2]
    assert [copy[1] // ROW for copy in k] == [15, 0, 1, 6]


@pytest.mark.parametrize("axes", [(NHD, NHD), (HND, NHD), (NHD, HND)], ids=["runs", "grid", "grid back"])
def test_any_cut_of_the_stream_gives_the_same_bytes(axes):
    plan = Plan(template(*axes, heads=3), table(3, 0, 4), table(1, 2, 5), first_token=1, end_token=11)

    def byte_pairs(begin, end):
        pairs = []
        for source, target, size, inner, outer, si, ti, so, to in plan.copies(begin, end)[:, 2:].tolist():
            pairs += [
                (source + o * so + i * si + byte, target + o * to + i * ti + byte)
                for o in range(outer)
                for i in range(inner)
                for byte in range(size)
            ]
        return pairs

    whole = byte_pairs(0, plan.total_bytes)
    assert len(set(whole)) == plan.total_bytes == 10 * 3 * 16 * 2
    for cut in range(0, plan.total_bytes + 1, 7):
        assert byte_pairs(0, cut) + byte_pairs(cut, plan.total_bytes) == whole
    assert byte_pairs(5, 5) == []
    assert byte_pairs(plan.total_bytes, plan.total_bytes + 100) == []


def test_holes_of_the_target_are_not_wanted():
    plan = Plan(template(), table(3, -1, 5), table(1, -1, 0), end_token=12)
    assert plan.describe(0, plan.total_bytes) == [
        ("full", "l0", "k", 0, 1, 0, 4),
        ("full", "l0", "k", 0, 1, 8, 12),
        ("full", "l0", "v", 0, 1, 0, 4),
        ("full", "l0", "v", 0, 1, 8, 12),
    ]


def test_entries_outside_of_the_range_are_not_looked_at():
    """A prefix that the target has already may be holes on both sides, and tables may be longer than the request."""
    plan = Plan(template(), table(-1, 2, 99), table(-1, 2, 2), first_token=4, end_token=8)
    assert plan.total_bytes == 2 * 4 * ROW


def test_nothing_to_move_is_a_plan_too():
    for arguments in ({"end_token": 0}, {"first_token": 5, "end_token": 5}):
        plan = Plan(template(), table(), table(), **arguments)
        assert plan.total_bytes == 0
        assert plan.copies().shape == (0, 11)
        assert plan.valid_prefix_tokens([], num_tokens=7) == 7


def test_the_valid_prefix_ends_where_the_first_missing_token_is():
    plan = Plan(template(), table(3, 0, 5), table(1, 4, 0), end_token=10)
    block = 4 * ROW
    assert plan.valid_prefix_tokens([(block, block + 1)], num_tokens=10) == 4
    assert plan.valid_prefix_tokens([(block - 1, block + 1)], num_tokens=10) == 0
    last_of_v = plan.total_bytes - 1
    assert plan.valid_prefix_tokens([(last_of_v, last_of_v + 1)], num_tokens=10) == 8
    assert plan.describe(last_of_v, last_of_v + 1) == [("full", "l0", "v", 0, 1, 8, 10)]


def test_what_did_not_arrive_is_named_by_the_heads_of_the_model():
    plan = Plan(template(heads=4, target_heads=range(1, 3)), table(2, 0), table(3, 1), end_token=6)
    assert plan.describe(0, plan.total_bytes) == [("full", "l0", "k", 1, 3, 0, 6), ("full", "l0", "v", 1, 3, 0, 6)]
    assert plan.describe(0, 1) == [("full", "l0", "k", 1, 3, 0, 4)]


@pytest.mark.parametrize(
    ("source", "target", "tokens", "error", "reason"),
    [
        ((0,), (6,), 1, InvalidArgument, r"target block 6 is outside \[0, 6\)"),
        ((6,), (0,), 1, InvalidArgument, r"source block 6 is outside \[0, 6\)"),
        ((0, 1), (2, 2), 8, InvalidArgument, "target block 2 appears twice"),
        ((0,), (-2,), 1, InvalidArgument, "entry 0 of the target table is -2"),
        ((-2,), (0,), 1, InvalidArgument, "entry 0 of the source table is -2"),
        ((0,), (0,), 5, InvalidArgument, "table has 1 blocks of 4 tokens, none for token 4"),
        ((0,), (0, 1), 5, InvalidArgument, "the source table has 1 blocks"),
        ((0, -1), (0, 1), 5, NotOffered, "token 4, which is in a hole of the source"),
    ],
)
def test_tables_that_would_corrupt_the_target_are_refused(source, target, tokens, error, reason):
    with pytest.raises(error, match=reason):
        Plan(template(), table(*source), table(*target), end_token=tokens)


def test_tables_for_other_groups_are_refused():
    with pytest.raises(InvalidArgument, match="2 of 1 groups"):
        Plan(template(), table(0) * 2, table(0) * 2, end_token=1)


def test_a_block_may_be_read_twice():
    """Two sequences that share a prefix block are one source."""
    plan = Plan(template(), table(3, 3), table(0, 1), end_token=8)
    assert plan.total_bytes == 2 * 8 * ROW


def test_a_one_sided_plan_has_the_same_stream():
    geometry = template(HND, NHD, heads=3)
    plan = Plan(geometry, table(3, 0), table(1, 2), first_token=1, end_token=7)
    sender = Plan.one_sided(geometry, plan, "source")
    assert sender.total_bytes == plan.total_bytes
    np.testing.assert_array_equal(sender.copies(10, 200), plan.copies(10, 200, packed="target"))
    with pytest.raises(InvalidArgument, match="no side called both"):
        Plan.one_sided(geometry, plan, "both")
