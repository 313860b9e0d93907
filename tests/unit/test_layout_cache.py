"""KVCache: what users say about their tensors becomes plain data, or a typed refusal."""

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from kvlink.errors import InvalidArgument
from kvlink.layout import CacheLayout, KVCache

AXES = "kv block token head dim"


def tensor(*shape):
    return np.zeros(shape, np.float16)


def parts_by_key(cache):
    return {(part.layer, part.component): part for part in cache.layout.parts}


def test_each_axis_finds_its_stride():
    memory = tensor(2, 5, 4, 3, 8)
    cache = KVCache.from_tensors({"layers.0": memory}, axes=AXES, block_tokens=4)
    k, v = cache.layout.parts
    assert (k.component, v.component) == ("k", "v")
    assert (k.offset, v.offset) == (0, 5 * 4 * 3 * 8 * 2)
    assert (k.block_stride, k.token_stride, k.head_stride, k.dim_stride) == (192, 48, 16, 2)
    assert (k.head_start, k.head_count, k.total_kv_heads, k.head_dim) == (0, 3, 3, 8)
    assert (cache.num_blocks(), cache.block_tokens("full"), cache.groups) == (5, 4, ("full",))
    assert [region.address for region in cache.regions] == [memory.ctypes.data]
    assert cache.layout.region_bytes == (memory.nbytes,)


def test_any_order_of_axes_describes_the_same_elements():
    memory = tensor(2, 5, 4, 3, 8)
    plain = KVCache.from_tensors({"a": memory}, axes=AXES, block_tokens=4)
    turned = KVCache.from_tensors(
        {"a": memory.transpose(4, 2, 0, 3, 1)}, axes="dim token kv head block", block_tokens=4
    )
    assert plain.layout == turned.layout


def test_k_and_v_apart_equal_k_and_v_fused():
    memory = tensor(2, 5, 4, 3, 8)
    fused = KVCache.from_tensors({"a": memory}, axes=AXES, block_tokens=4)
    apart = KVCache.from_tensors({"a": {"k": memory[0], "v": memory[1]}}, axes="block token head dim", block_tokens=4)
    for key, part in parts_by_key(fused).items():
        other = parts_by_key(apart)[key]
        assert apart.regions[other.region].address + other.offset == fused.regions[0].address + part.offset
        assert msgspec.structs.replace(other, region=0, offset=0) == msgspec.structs.replace(part, region=0, offset=0)


def test_k_and_v_packed_in_one_dimension_are_two_views():
    memory = tensor(5, 4, 3, 16)
    cache = KVCache.from_tensors(
        {"a": {"k": memory[..., :8], "v": memory[..., 8:]}}, axes="block token head dim", block_tokens=4
    )
    assert len(cache.regions) == 1
    assert [part.offset for part in cache.layout.parts] == [0, 16]


def test_one_tensor_for_all_layers():
    memory = tensor(5, 2, 3, 4, 1, 8)
    cache = KVCache.from_tensors(
        {"all": memory}, axes="block kv layer token head dim", layers=["l0", "l1", "l2"], block_tokens=4
    )
    assert set(parts_by_key(cache)) == {(layer, c) for layer in ("l0", "l1", "l2") for c in ("k", "v")}
    assert len(cache.regions) == 1
    assert parts_by_key(cache)["l2", "v"].offset == memory[0, 1, 2].ctypes.data - memory.ctypes.data


def test_without_a_head_axis_the_data_is_a_latent():
    cache = KVCache.from_tensors({"a": tensor(5, 4, 576)}, axes="block token dim", block_tokens=4)
    (part,) = cache.layout.parts
    assert (part.component, part.head_count, part.total_kv_heads, part.head_dim) == ("latent", 1, 1, 576)


def test_heads_of_a_rank_are_global():
    cache = KVCache.from_tensors(
        {"a": tensor(2, 5, 4, 2, 8)}, axes=AXES, block_tokens=4, heads=range(2, 4), total_kv_heads=8
    )
    assert {(part.head_start, part.head_count, part.total_kv_heads) for part in cache.layout.parts} == {(2, 2, 8)}


def test_tensors_that_only_touch_stay_regions_of_their_own():
    """Neighbours may be two allocations, and no registration or mapping reaches from one into the other."""
    memory = tensor(2, 2, 5, 4, 1, 8)
    cache = KVCache.from_tensors({"a": memory[0], "b": memory[1]}, axes=AXES, block_tokens=4)
    assert len(cache.regions) == 2
    shared = tensor(2, 5, 2, 4, 1, 8)
    interleaved = KVCache.from_tensors({"a": shared[:, :, 0], "b": shared[:, :, 1]}, axes=AXES, block_tokens=4)
    assert len(interleaved.regions) == 1
    assert len(interleaved.regions[0].owner) == 2


def test_regions_grow_to_the_allocation_they_lie_in():
    memory = tensor(3, 2, 5, 4, 1, 8)
    pool = SimpleNamespace(address=memory.ctypes.data - 4096, nbytes=memory.nbytes + 8192)
    apart = KVCache.from_tensors({"a": memory[0], "b": memory[2]}, axes=AXES, block_tokens=4)
    cache = apart.within_allocations(lambda address: pool)
    assert [(region.address, region.nbytes) for region in cache.regions] == [(pool.address, pool.nbytes)]
    assert cache.layout.region_bytes == (pool.nbytes,)
    for before, after in zip(apart.layout.parts, cache.layout.parts, strict=True):
        assert pool.address + after.offset == apart.regions[before.region].address + before.offset
    unknown = apart.within_allocations(lambda address: None)
    assert (unknown.layout, unknown.regions) == (apart.layout, apart.regions)


def test_joined_caches_keep_their_groups_apart():
    full = KVCache.from_tensors({"l0": tensor(2, 5, 4, 1, 8)}, axes=AXES, block_tokens=4, model="m")
    window = KVCache.from_tensors({"l1": tensor(2, 9, 2, 1, 8)}, axes=AXES, block_tokens=2, group="window", window=1024)
    cache = KVCache.join(full, window)
    assert cache.groups == ("full", "window")
    assert (cache.num_blocks("window"), cache.block_tokens("window")) == (9, 2)
    assert cache.layout.model == "m"
    assert cache.layout.group("window").window == 1024
    with pytest.raises(InvalidArgument, match="two groups of one name"):
        KVCache.join(full, full)
    with pytest.raises(InvalidArgument, match="no group 'other'"):
        cache.num_blocks("other")


def test_a_layout_survives_the_wire():
    layout = KVCache.from_tensors({"a": tensor(2, 5, 4, 3, 8)}, axes=AXES, block_tokens=4).layout
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=CacheLayout) == layout
    assert msgspec.json.decode(msgspec.json.encode(layout), type=CacheLayout) == layout


def test_a_dtype_tag_may_name_what_bytes_are():
    memory = np.zeros((2, 5, 4, 1, 8), np.uint8)
    cache = KVCache.from_tensors({"a": memory}, axes=AXES, block_tokens=4, dtype="float8_e4m3fn")
    assert {part.dtype for part in cache.layout.parts} == {"float8_e4m3fn"}
    opaque = KVCache.from_tensors({"a": memory}, axes=AXES, block_tokens=4, dtype="opaque1")
    assert {part.dtype for part in opaque.layout.parts} == {"opaque1"}
    with pytest.raises(InvalidArgument, match="elements of 1 bytes"):
        KVCache.from_tensors({"a": memory}, axes=AXES, block_tokens=4, dtype="bfloat16")


GOOD = tensor(2, 5, 4, 3, 8)


@pytest.mark.parametrize(
    ("tensors", "options", "reason"),
    [
        ({"a": GOOD}, {"axes": "kv block token head width"}, "unknown axis 'width'"),
        ({"a": GOOD}, {"axes": "kv block token head head"}, "'head' appears twice"),
        ({"a": GOOD}, {"axes": "kv block token head"}, "'dim' is missing"),
        ({"a": GOOD}, {"axes": ["kv"]}, "must be a string"),
        ({"a": GOOD[0]}, {}, "has 4 dimensions"),
        ({"a": tensor(3, 5, 4, 3, 8)}, {}, "size 3 on its kv axis, not 2"),
        ({"a": GOOD}, {"block_tokens": 8}, "size 4 on its token axis, not 8"),
        ({"a": GOOD}, {"block_tokens": "4"}, "token axis"),
        ({"a": GOOD}, {"heads": range(2), "total_kv_heads": 8}, "size 3 on its head axis, not 2"),
        ({"a": GOOD}, {"heads": range(3)}, "needs total_kv_heads"),
        ({"a": GOOD}, {"heads": range(6, 9), "total_kv_heads": 8}, "there are 8 heads in all"),
        ({"a": GOOD}, {"heads": range(0, 6, 2), "total_kv_heads": 8}, "range of step 1"),
        ({"a": GOOD}, {"heads": [0, 1, 2], "total_kv_heads": 8}, "range of step 1"),
        ({"a": GOOD}, {"total_kv_heads": 8}, "head axis, not 8"),
        ({"a": GOOD[0]}, {"axes": "block token head dim"}, "without a kv axis"),
        ({"a": {"k": GOOD[0], "v": GOOD[1]}}, {}, "no kv axis"),
        ({"a": {"k": GOOD[0]}}, {"axes": "block token head dim"}, r"not \['k'\]"),
        ({"a": GOOD[0, ..., 0, :]}, {"axes": "block token dim", "total_kv_heads": 2}, "need a head axis"),
        ({"a": GOOD, "b": tensor(2, 6, 4, 3, 8)}, {}, "b has 6 blocks, another tensor has 5"),
        ({}, {}, "at least one layer"),
        (GOOD, {}, "must map"),
        ({7: GOOD}, {}, "layer names are strings"),
        ({"a": GOOD}, {"layers": ["a", "b"]}, "goes with a layer axis"),
        ({"a": GOOD}, {"axes": "layer block token head dim"}, "goes with a layer axis"),
        ({"a": GOOD}, {"axes": "layer block token head dim", "layers": ["x", "x"]}, "a name twice"),
        ({"a": GOOD}, {"window": 0}, "malformed"),
        ({"a": GOOD}, {"group": ""}, "malformed"),
        ({"a": GOOD, "b": GOOD}, {}, "share bytes"),
        ({"a": GOOD, "b": GOOD.transpose(0, 1, 2, 4, 3).reshape(2, 5, 4, 3, 8)[:]}, {"block_tokens": 3}, "token axis"),
        ({"a": np.broadcast_to(tensor(1, 5, 4, 3, 8), (2, 5, 4, 3, 8))}, {}, "read-only"),
        ({"a": np.lib.stride_tricks.as_strided(GOOD, strides=(0, 192, 48, 16, 2))}, {}, "share bytes"),
        ({"a": np.lib.stride_tricks.as_strided(GOOD, strides=(960, 190, 48, 16, 2))}, {}, "blocks share bytes"),
    ],
)
def test_a_description_that_cannot_be_right_is_refused(tensors, options, reason):
    arguments = {"axes": AXES, "block_tokens": 4, **options}
    with pytest.raises(InvalidArgument, match=reason):
        KVCache.from_tensors(tensors, **arguments)
