"""Requests packed in NumPy: head slices, sliding windows, slots, latents, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvlink
from kvlink import errors
from kvlink.plan.packed import gather, packed_bytes, scatter, wanted_tokens


def memory_of(cache: kvlink.KVCache) -> list[Any]:
    return [np.asarray(region.owner).reshape(-1).view(np.uint8) for region in cache.regions]


def heads_cache(values: np.ndarray, *, first: int, block_tokens: int, **more: Any) -> kvlink.KVCache:
    heads = range(first, first + values.shape[3])
    return kvlink.KVCache.from_tensors(
        {"layers.0": values},
        axes="kv block token head dim",
        block_tokens=block_tokens,
        heads=heads,
        total_kv_heads=8,
        **more,
    )


def moved(source: kvlink.KVCache, target: kvlink.KVCache, tables: Any, *, num_tokens: int, skip_tokens: int = 0) -> int:
    """Hand a request over; return its bytes."""
    from_tables, to_tables = ({name: np.array(table, np.int32) for name, table in side.items()} for side in tables)
    tokens = wanted_tokens(target.layout, to_tables, skip_tokens=skip_tokens, num_tokens=num_tokens)
    packed = gather(source.layout, memory_of(source), from_tables, target=target.layout, tokens=tokens)
    assert len(packed) == packed_bytes(target.layout, tokens)
    scatter(target.layout, memory_of(target), to_tables, tokens=tokens, packed=packed)
    return len(packed)


def numbered(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.int32).reshape(shape)


def test_a_rank_takes_its_heads_across_blocks_of_another_size() -> None:
    source, target = numbered(2, 4, 4, 8, 3), np.zeros((2, 8, 2, 2, 3), np.int32)
    tables = ({"full": [3, 1]}, {"full": [5, 0, 7]})
    nbytes = moved(
        heads_cache(source, first=0, block_tokens=4),
        heads_cache(target, first=4, block_tokens=2),
        tables,
        num_tokens=6,
    )
    assert nbytes == 2 * 6 * 2 * 3 * 4
    by_token = np.concatenate([source[:, 3], source[:, 1]], axis=1)[:, :6, 4:6]
    assert (np.concatenate([target[:, 5], target[:, 0], target[:, 7]], axis=1) == by_token).all()
    assert not target[:, [1, 2, 3, 4, 6]].any()


def test_of_a_sliding_window_only_what_lies_in_it_moves() -> None:
    source, target = numbered(2, 4, 2, 8, 1), np.zeros((2, 4, 2, 8, 1), np.int32)
    caches = [heads_cache(one, first=0, block_tokens=2, window=3) for one in (source, target)]
    nbytes = moved(*caches, ({"full": [0, 1, 2]}, {"full": [2, 3, 1]}), num_tokens=6)
    assert nbytes == 2 * 3 * 8 * 4
    assert not target[:, 2].any()
    assert not target[:, 3, 0].any()
    assert (target[:, 3, 1] == source[:, 1, 1]).all()
    assert (target[:, 1] == source[:, 2]).all()


def test_slots_move_whole_whatever_the_tokens() -> None:
    source, target = numbered(4, 5), np.zeros((4, 5), np.int32)
    caches = [kvlink.KVCache.from_tensors({"l": one}, axes="slot dim", group="state") for one in (source, target)]
    moved(*caches, ({"state": [2]}, {"state": [1]}), num_tokens=100, skip_tokens=100)
    assert (target[1] == source[2]).all()
    assert not target[[0, 2, 3]].any()


def test_latents_move() -> None:
    source, target = numbered(4, 2, 5), np.zeros((4, 2, 5), np.int32)
    caches = [
        kvlink.KVCache.from_tensors({"l": one}, axes="block token dim", block_tokens=2) for one in (source, target)
    ]
    moved(*caches, ({"full": [2, 0]}, {"full": [1, -1]}), num_tokens=4, skip_tokens=1)
    assert (target[1, 1] == source[2, 1]).all()
    assert np.count_nonzero(target) == 5


def test_what_the_source_does_not_hold_is_refused() -> None:
    source, target = numbered(2, 4, 2, 4, 1), np.zeros((2, 4, 2, 4, 1), np.int32)
    held = heads_cache(source, first=0, block_tokens=2)
    with pytest.raises(errors.LayoutMismatch, match="heads"):
        moved(held, heads_cache(target, first=4, block_tokens=2), ({"full": [0]}, {"full": [0]}), num_tokens=2)
    with pytest.raises(errors.NotOffered):
        moved(held, heads_cache(target, first=0, block_tokens=2), ({"full": [-1]}, {"full": [0]}), num_tokens=2)
    with pytest.raises(errors.NotOffered):
        moved(held, heads_cache(target, first=0, block_tokens=2), ({"full": [0]}, {"full": [0, 1]}), num_tokens=4)
