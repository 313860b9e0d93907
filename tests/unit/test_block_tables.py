"""Block tables are taken in the forms that engines have, and refused before anything moves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvlink.errors import InvalidArgument
from kvlink.handoff.block_tables import Group, block_tables

FULL = Group(name="full", num_blocks=8, block_tokens=4)
SLIDING = Group(name="sliding", num_blocks=3, block_tokens=8)
STATE = Group(name="state", num_blocks=5, block_tokens=1, slots=True)


def tables(blocks: Any, *groups: Group, num_tokens: int = 11) -> list[list[int]]:
    found = block_tables(blocks, groups or (FULL,), num_tokens=num_tokens, operation="pull")
    for table in found:
        assert table.dtype == np.int32
        assert table.flags["C_CONTIGUOUS"]
        assert table.flags["OWNDATA"] or table.base.flags["OWNDATA"]
    return [table.tolist() for table in found]


@pytest.mark.parametrize(
    "blocks",
    [
        [3, -1, 4],
        (3, -1, 4),
        np.array([3, -1, 4], dtype=np.int32),
        np.array([3, 9, -1, 9, 4, 9], dtype=np.int32)[::2],
        [np.int32(3), np.int64(-1), 4],
        np.array([3, -1, 4]),
        np.array([3, -1, 4], dtype=">i4"),
        {"full": [3, -1, 4]},
    ],
    ids=["list", "tuple", "array", "strided", "scalars", "int64", "swapped", "mapping"],
)
def test_every_form_gives_the_same_table(blocks: Any) -> None:
    assert tables(blocks) == [[3, -1, 4]]


def test_the_caller_may_reuse_the_array() -> None:
    mine = np.array([1, 2, 3], dtype=np.int32)
    (table,) = block_tables(mine, (FULL,), num_tokens=11, operation="pull")
    mine[:] = 7
    assert table.tolist() == [1, 2, 3]


def test_padding_behind_the_last_token_is_ignored() -> None:
    assert tables([1, 2, 3, 0, 0, 99, -5]) == [[1, 2, 3]]
    assert tables([], num_tokens=0) == [[]]
    assert tables([5, 5], num_tokens=1) == [[5]]


def test_groups_come_in_the_order_of_the_cache() -> None:
    assert tables({"sliding": [2, 0], "full": range(3)}, FULL, SLIDING) == [[0, 1, 2], [2, 0]]


@pytest.mark.parametrize(
    ("blocks", "groups", "said"),
    [
        ([0, 1], (FULL,), "2 blocks, and 11 tokens in blocks of 4 need 3"),
        ([0, 1, 8], (FULL,), r"block 8 is outside \[0, 8\)"),
        ([0, 1, -2], (FULL,), "block -2"),
        ([0, 1, 0], (FULL,), "block 0 appears twice"),
        ([0, 1, 2**31], (FULL,), "no block id"),
        ([0, 1, -(2**63)], (FULL,), "no block id"),
        ([0, 1, 2**70], (FULL,), "no block id"),
        ([0, 1, 1.5], (FULL,), "no block id"),
        (["0", "1", "2"], (FULL,), "no block id"),
        ([True, False, True], (FULL,), "no block id"),
        ([np.True_, 1, 2], (FULL,), "no block id"),
        ([np.float32(0), 1, 2], (FULL,), "no block id"),
        ([0, 1, 2, 3, "padding"], (FULL,), "no block id"),
        ([0, 1, 2**31 - 1], (FULL,), r"block 2147483647 is outside"),
        ([np.arange(3), [1], [2]], (FULL,), "2 dimensions"),
        ([None, 1, 2], (FULL,), "no block id"),
        ([[0], [1, 2]], (FULL,), "block"),
        ([[0, 1, 2]], (FULL,), "2 dimensions"),
        (np.zeros((3, 1), dtype=np.int32), (FULL,), "2 dimensions"),
        (np.array([0, 1, 8], dtype=np.int32), (FULL,), r"block 8 is outside \[0, 8\)"),
        (np.array([5, -1, 5], dtype=np.int32), (FULL,), "block 5 appears twice"),
        (np.arange(3.0), (FULL,), "array of float64; give int32"),
        (np.array([True, False, True]), (FULL,), "array of bool; give int32"),
        (np.array([0, 1, 1 << 32]), (FULL,), "a block id that is no 32-bit integer"),
        (np.array([0, 1, 1 << 31], dtype=np.uint32), (FULL,), "a block id that is no 32-bit integer"),
        ("012", (FULL,), "not str"),
        (b"012", (FULL,), "not bytes"),
        (7, (FULL,), "not int"),
        (None, (FULL,), "not NoneType"),
        ({"sliding": [0, 1, 2]}, (FULL,), "sliding"),
        ({"full": [0, 1, 2]}, (FULL, SLIDING), "groups"),
        ([0, 1, 2], (FULL, SLIDING), "give one for each"),
        ({1: [0, 1, 2]}, (FULL,), "groups"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(blocks: Any, groups: Any, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        tables(blocks, *groups)


def test_slots_of_state_are_taken_as_they_are_however_many_tokens_there_are() -> None:
    for num_tokens in (0, 1, 11):
        assert tables([4, -1, 2], STATE, num_tokens=num_tokens) == [[4, -1, 2]]
        assert tables([], STATE, num_tokens=num_tokens) == [[]]
    for wrong in ([5], [1, 1], [-2]):
        with pytest.raises(InvalidArgument, match="outside|twice"):
            tables(wrong, STATE)


def test_a_list_that_shrinks_while_it_is_read_leaves_no_entry_unread() -> None:
    class Shrinking:
        def __index__(self) -> int:
            del table[1:]
            return 1

    table: list[Any] = [Shrinking(), 2, 3]
    with pytest.raises(InvalidArgument, match="became shorter while it was read"):
        tables(table)


def test_any_table_is_taken_or_refused_as_a_set_says() -> None:
    """Random tables around the sizes where the set that finds repeats grows, with repeats of close and far blocks."""
    rng = np.random.default_rng(5)
    for length in (*range(12), 31, 32, 33, 127, 128, 129):
        for _ in range(40):
            group = Group(name="full", num_blocks=int(rng.integers(1, 300)), block_tokens=1)
            table = rng.permutation(max(group.num_blocks, length))[:length].astype(np.int32)
            table[rng.random(length) < 0.2] = -1
            if length > 1 and rng.random() < 0.4:
                table[rng.integers(length)] = table[rng.integers(length)]
            blocks = table[table >= 0].tolist()
            right = len(set(blocks)) == len(blocks) and max(blocks, default=0) < group.num_blocks
            for given in (table, table.tolist()):
                if right:
                    assert tables(given, group, num_tokens=length) == [table.tolist()]
                else:
                    with pytest.raises(InvalidArgument, match="outside|twice"):
                        tables(given, group, num_tokens=length)
