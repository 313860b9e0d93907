"""What the caller gets wrong is refused with a typed error, and nothing moves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.patterns import Geometry, Placement, Request
from helpers.processes import Pair

import kvlink
from kvlink import errors

AXES = "kv block token head dim"
REQUEST = Request(source_blocks=(6, 1, 4), target_blocks=(0, 7, 3), num_tokens=11)


def tensors(shape: tuple[int, ...] = (2, 8, 4, 2, 8), dtype: str = "float32") -> dict[str, Any]:
    return {"layers.0": np.zeros(shape, dtype=dtype), "layers.1": np.zeros(shape, dtype=dtype)}


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        ("kv block token head width", "width"),
        ("kv block token head head", "head"),
        ("kv block token head", "5|axes"),
        ("kv block token head dim dim2", "dim2"),
        ("", "axes"),
        ("kv layer token head dim", "block"),
    ],
)
def test_axes_that_do_not_describe_the_tensors_are_refused_by_name(axes: str, said: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=said):
        kvlink.KVCache.from_tensors(tensors(), axes=axes, block_tokens=4)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"layers.1": np.zeros((2, 9, 4, 2, 8), dtype="float32")}, "block"),
        ({"layers.1": np.zeros((2, 8, 5, 2, 8), dtype="float32")}, "token"),
        ({"layers.1": np.zeros((3, 8, 4, 2, 8), dtype="float32")}, "kv"),
        ({"layers.1": np.zeros((2, 8, 4, 2), dtype="float32")}, "layers.1"),
        ({"layers.1": np.zeros((2, 0, 4, 2, 8), dtype="float32")}, "layers.1"),
    ],
    ids=["blocks", "tokens", "kv", "rank", "empty"],
)
def test_mismatching_shapes_are_refused_by_name(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=said):
        kvlink.KVCache.from_tensors({**tensors(), **changed}, axes=AXES, block_tokens=4)


def test_no_tensors_at_all_are_refused() -> None:
    with pytest.raises(errors.InvalidArgument):
        kvlink.KVCache.from_tensors({}, axes=AXES, block_tokens=4)


@pytest.mark.parametrize(
    ("heads", "total", "said"),
    [(range(3), 8, "3"), (range(7, 9), 8, "8"), (range(0, 4, 2), 8, "step|range|heads"), (range(0), 8, "heads")],
    ids=["count", "beyond", "step", "none"],
)
def test_a_share_of_heads_that_does_not_fit_the_tensors_is_refused(heads: range, total: int, said: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=said):
        kvlink.KVCache.from_tensors(tensors(), axes=AXES, block_tokens=4, heads=heads, total_kv_heads=total)


def test_k_and_v_apart_must_have_the_same_blocks() -> None:
    apart = {"layers.0": {"k": np.zeros((8, 4, 2, 8)), "v": np.zeros((9, 4, 2, 8))}}
    with pytest.raises(errors.InvalidArgument, match="block"):
        kvlink.KVCache.from_tensors(apart, axes="block token head dim", block_tokens=4)


def test_k_without_v_is_refused() -> None:
    apart = {"layers.0": {"k": np.zeros((8, 4, 2, 8))}}
    with pytest.raises(errors.InvalidArgument, match="'k' and 'v'"):
        kvlink.KVCache.from_tensors(apart, axes="block token head dim", block_tokens=4)


def test_memory_that_appears_twice_is_refused() -> None:
    same = np.zeros((2, 8, 4, 2, 8), dtype="float32")
    with pytest.raises(errors.InvalidArgument, match="layers.1|overlap|share"):
        kvlink.KVCache.from_tensors({"layers.0": same, "layers.1": same}, axes=AXES, block_tokens=4)


def test_blocks_that_share_bytes_are_refused() -> None:
    memory = np.zeros(2 * 8 * 4 * 2 * 8, dtype="float32")
    aliased = np.lib.stride_tricks.as_strided(memory, (2, 8, 4, 2, 8), (1024, 64, 64, 32, 4))
    with pytest.raises(errors.InvalidArgument):
        kvlink.KVCache.from_tensors({"layers.0": aliased}, axes=AXES, block_tokens=4)


@pytest.mark.parametrize("value", [3, "text", object(), None, [1.0, 2.0]], ids=lambda value: type(value).__name__)
def test_an_object_without_memory_is_refused(value: Any) -> None:
    with pytest.raises((errors.UnsupportedMemory, errors.InvalidArgument)):
        kvlink.KVCache.from_tensors({"layers.0": value}, axes=AXES, block_tokens=4)


@pytest.mark.parametrize(
    ("blocks", "num_tokens", "said"),
    [
        ([6, 8, 4], 11, "8"),
        ([6, -2, 4], 11, "-2"),
        ([6, 1], 11, "11|3"),
        ([6, 1, 6], 11, "6"),
        ([6, 1, 4], -1, "-1"),
        ([6, 2**31, 4], 11, "block"),
        ({"sliding": [6, 1, 4]}, 11, "sliding"),
        ([[6, 1, 4]], 11, "block"),
        (["6"], 1, "block"),
        ([1.5], 1, "block"),
    ],
    ids=["range", "negative", "short", "twice", "tokens", "overflow", "group", "nested", "text", "float"],
)
def test_an_offer_of_blocks_that_cannot_be_is_refused(opened: Pair, blocks: Any, num_tokens: int, said: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=said):
        opened.source.call("offer", blocks, num_tokens)
    assert not any(opened.holds())


@pytest.mark.parametrize(
    ("blocks", "options", "said"),
    [
        ([0, 8, 3], {}, "8"),
        ([0, -7, 3], {}, "-7"),
        ([0, 7], {}, "11|3"),
        ([0, 7, 0], {}, "0"),
        ([0, 7, 3], {"skip_tokens": 12}, "12"),
        ([0, 7, 3], {"skip_tokens": -1}, "-1"),
        ([0, 7, 3], {"deadline_s": 0.0}, "deadline"),
        ([0, 7, 3], {"deadline_s": float("nan")}, "deadline"),
        ([0, 7, 3], {"require": "pigeon"}, "pigeon"),
    ],
    ids=["range", "negative", "short", "twice", "skip", "skip-negative", "deadline", "deadline-nan", "lane"],
)
def test_a_pull_into_blocks_that_cannot_be_is_refused(opened: Pair, blocks: Any, options: Any, said: str) -> None:
    offered, ticket = opened.offer(REQUEST)
    with pytest.raises((errors.InvalidArgument, errors.LaneUnavailable), match=said):
        opened.target.call("wait", opened.target.call("pull", ticket, blocks, **options))
    opened.source.call("cancel", offered)
    opened.source.call("wait_released", offered)
    assert not any(opened.holds())
    opened.verify()


def test_a_block_that_another_pull_writes_or_an_offer_reads_is_busy(opened: Pair) -> None:
    offered, _ = opened.target.call("offer", [7], 4)
    pulled_from, ticket = opened.offer(REQUEST)
    with pytest.raises(errors.BlocksBusy, match="7"):
        opened.target.call("wait", opened.target.call("pull", ticket, [0, 7, 3]))
    opened.target.call("cancel", offered)
    opened.target.call("wait_released", offered)
    opened.source.call("cancel", pulled_from)
    opened.source.call("wait_released", pulled_from)
    opened.hand_over(REQUEST)


def test_a_block_that_a_live_pull_writes_can_be_neither_pulled_into_nor_offered(opened: Pair) -> None:
    opened.hand_over(REQUEST)
    first, second = opened.offer(REQUEST)[1], opened.offer(REQUEST)[1]
    opened.source.pause()
    try:
        pulled = opened.pull(first, REQUEST, deadline_s=20)
        with pytest.raises(errors.BlocksBusy, match="7"):
            opened.target.call("wait", opened.target.call("pull", second, [1, 7, 2]))
        with pytest.raises(errors.BlocksBusy, match="7"):
            opened.target.call("offer", [7], 4)
    finally:
        opened.source.resume()
    opened.target.call("wait", pulled)
    opened.verify()


def test_more_handoffs_than_the_limits_allow_are_refused_until_one_ends(opened: Pair) -> None:
    opened.open(limits=kvlink.Limits(max_handoffs=2))
    offers = [opened.offer(REQUEST)[0] for _ in range(2)]
    with pytest.raises(errors.Busy):
        opened.offer(REQUEST)
    opened.source.call("cancel", offers[0])
    opened.source.call("wait_released", offers[0])
    opened.hand_over(REQUEST)


@pytest.mark.parametrize(
    ("target", "named"),
    [
        (Geometry(head_dim=16), ("dim", "8", "16")),
        (Geometry(heads=4), ("head", "2", "4")),
        (Geometry(dtype="float16"), ("dtype", "float32", "float16")),
        (Geometry(layers=("layers.0", "layers.7")), ("layer", "layers.1", "layers.7")),
    ],
    ids=["head-dim", "heads", "dtype", "layers"],
)
def test_layouts_that_cannot_be_paired_are_refused_with_the_field_and_both_values(
    opened: Pair, target: Geometry, named: tuple[str, ...]
) -> None:
    opened.target.call("open", target, Placement(), seed=3)
    before = opened.target.call("memory")
    offered, ticket = opened.offer(REQUEST)
    with pytest.raises(errors.LayoutMismatch) as caught:
        opened.target.call("wait", opened.pull(ticket, REQUEST))
    for word in named:
        assert word in str(caught.value)
    assert np.array_equal(opened.target.call("memory"), before)
    opened.source.call("cancel", offered)
    opened.source.call("wait_released", offered)
    assert not any(opened.holds())


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0"])
def test_without_a_secret_a_node_listens_on_loopback_only(listen: str) -> None:
    cache = kvlink.KVCache.from_tensors(tensors(), axes=AXES, block_tokens=4)
    with pytest.raises(errors.ConfigError, match=r"listen=.* there is no secret: pass secret="):
        kvlink.Node(cache, name="open-to-all", listen=listen)


@pytest.mark.parametrize("listen", ["nowhere", ":0", "127.0.0.1", "127.0.0.1:70000", "no such host.invalid:0", 7])
def test_an_address_that_is_none_is_refused(listen: Any) -> None:
    cache = kvlink.KVCache.from_tensors(tensors(), axes=AXES, block_tokens=4)
    with pytest.raises((errors.ConfigError, errors.InvalidArgument)):
        kvlink.Node(cache, name="lost", listen=listen)
