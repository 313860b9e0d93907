"""`kvlink.testing`'s tags: a right copy passes, every kind of wrong one is named."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.patterns import COMPONENTS, Geometry, Placement, Request, Side, carve, first_difference, hand_over

from kvlink.testing import check_tokens, fill_tokens

AXES = "kv block token head dim"
APART = "block head token dim"


def caches() -> tuple[dict[str, np.ndarray], dict[str, dict[str, np.ndarray]]]:
    source = {name: np.zeros((2, 6, 4, 2, 8), dtype=np.float16) for name in ("a", "b")}
    target = {name: {part: np.zeros((6, 2, 4, 8), dtype=np.float16) for part in COMPONENTS} for name in ("b", "a")}
    return source, target


def copy_token_by_token(source, target, source_blocks, target_blocks, tokens) -> None:
    for name, parts in target.items():
        for index, part in enumerate(COMPONENTS):
            for token in tokens:
                block, offset = source_blocks[token // 4], token % 4
                parts[part][target_blocks[token // 4], :, offset] = source[name][index, block, offset]


def test_a_right_copy_into_another_layout_passes():
    source, target = caches()
    fill_tokens(source, axes=AXES, blocks=[3, 1, 5], num_tokens=10, seed=4)
    copy_token_by_token(source, target, [3, 1, 5], [0, 2, 4], range(10))
    check_tokens(target, axes=APART, blocks=[0, 2, 4], num_tokens=10, seed=4)


def test_tags_fill_only_the_tokens_of_the_sequence():
    source, _ = caches()
    fill_tokens(source, axes=AXES, blocks=[3, -1, 5], num_tokens=10)
    written = np.argwhere(source["a"].any(axis=(0, 3, 4)))
    assert {tuple(int(index) for index in pair) for pair in written} == {(3, 0), (3, 1), (3, 2), (3, 3), (5, 0), (5, 1)}


@pytest.mark.parametrize("fault", ["swapped blocks", "a missing tail", "k for v", "another layer", "another seed"])
def test_a_wrong_copy_is_named(fault):
    source, target = caches()
    fill_tokens(source, axes=AXES, blocks=[3, 1, 5], num_tokens=10, seed=5 if fault == "another seed" else 4)
    blocks = [2, 0, 4] if fault == "swapped blocks" else [0, 2, 4]
    copy_token_by_token(source, target, [3, 1, 5], blocks, range(9 if fault == "a missing tail" else 10))
    if fault == "k for v":
        target["a"]["k"], target["a"]["v"] = target["a"]["v"], target["a"]["k"]
    if fault == "another layer":
        target["a"], target["b"] = target["b"], target["a"]
    with pytest.raises(AssertionError, match=r"layer '.' component [kv] token \d+ \(block \d, offset \d\) head"):
        check_tokens(target, axes=APART, blocks=[0, 2, 4], num_tokens=10, seed=4)


def test_a_skipped_prefix_is_not_compared():
    source, target = caches()
    fill_tokens(source, axes=AXES, blocks=[3, 1, 5], num_tokens=10)
    copy_token_by_token(source, target, [3, 1, 5], [0, 2, 4], range(5, 10))
    check_tokens(target, axes=APART, blocks=[0, 2, 4], num_tokens=10, skip_tokens=5)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("axes", [("dim", "head", "kv", "token", "block"), ("token", "block", "dim", "head")])
def test_the_reference_writes_only_what_the_request_names(axes, interleaved):
    """The reference of the property test, against `kvlink.testing`'s tags."""
    geometry = Geometry()
    source = Side.random(geometry, Placement(axes=axes, interleaved=interleaved, padding=(1, 0, 2)), seed=1)
    target = Side.random(geometry, Placement(padding=(0, 0, 0, 0, 3)), seed=2)
    before = target.flat.copy()
    request = Request(source_blocks=(6, 1, 4), target_blocks=(0, -1, 3), num_tokens=11, skip_tokens=2)
    written = carve(source.flat, geometry, source.placement)
    fill_tokens(written, axes=source.placement.axes_text, blocks=request.source_blocks, num_tokens=11)

    hand_over(source, target, request)

    tensors = carve(target.flat, geometry, target.placement)
    check_tokens(tensors, axes=AXES, blocks=request.target_blocks, num_tokens=11, skip_tokens=2)
    tokens_written = (4 - 2) + (11 - 8)
    assert first_difference(before, target.flat)
    assert np.count_nonzero(before != target.flat) <= tokens_written * 2 * 2 * 2 * 8 * 4
