"""Groups other than K and V of attention: slots of state, scales, and groups that lie in the same bytes."""

import msgspec
import numpy as np
import pytest

from kvlink._native import Plan
from kvlink.errors import InvalidArgument, NotOffered
from kvlink.layout import KVCache, validate_layout
from kvlink.plan import compile_template

AXES = "kv block token head dim"


def tensor(*shape):
    return np.zeros(shape, np.float16)


def int32(*numbers):
    return np.array(numbers, np.int32)


def state(slots=5, dim=8):
    return KVCache.from_tensors({"l0.ssm": tensor(slots, 2, dim)}, axes="slot head dim", group="state")


def test_slots_hold_the_state_of_a_request():
    cache = KVCache.from_tensors(
        {"l0.conv": tensor(5, 48), "l0.ssm": tensor(5, 48)}, axes="slot dim", group="state", model="m"
    )
    (group,) = cache.layout.groups
    assert (group.slots, group.num_blocks, group.block_tokens, group.window) == (True, 5, 1, None)
    part = cache.layout.parts[1]
    assert (part.layer, part.component, part.head_dim) == ("l0.ssm", "state", 48)
    assert (part.block_stride, part.token_stride, part.head_stride, part.dim_stride) == (96, 0, 0, 2)


def test_slots_of_all_layers_may_lie_in_one_tensor():
    cache = KVCache.from_tensors(
        {"all": tensor(3, 5, 4, 8)}, axes="layer slot head dim", layers=["a", "b", "c"], heads=range(4, 8),
        total_kv_heads=8, group="state",
    )  # fmt: skip
    assert [(part.layer, part.head_start, part.total_kv_heads) for part in cache.layout.parts] == [
        ("a", 4, 8),
        ("b", 4, 8),
        ("c", 4, 8),
    ]


@pytest.mark.parametrize(("first", "end"), [(0, 0), (0, 7), (7, 7), (6, 100)])
def test_slots_move_whole_whatever_the_tokens_are(first, end):
    template = compile_template(state(5).layout, state(9).layout)
    plan = Plan(template, [int32(4, 2)], [int32(8, 1)], first_token=first, end_token=end)
    assert plan.total_bytes == 2 * 2 * 8 * 2
    assert plan.copies()[:, 2:5].tolist() == [[4 * 32, 8 * 32, 32], [2 * 32, 1 * 32, 32]]
    assert plan.describe(0, 1) == [("state", "l0.ssm", "state", 0, 2, 0, 1)]
    assert plan.valid_prefix_tokens([(0, 1)], num_tokens=end) == 0, "no token is right without the state"


def test_a_table_without_slots_asks_for_none():
    template = compile_template(state().layout, state().layout)
    assert Plan(template, [int32(4)], [int32()], end_token=9).total_bytes == 0
    assert Plan(template, [int32(-1)], [int32(-1)], end_token=9).total_bytes == 0
    assert Plan(template, [int32(-1, 3)], [int32(-1, 0)], end_token=9).total_bytes == 32


@pytest.mark.parametrize(
    ("source", "target", "error", "said"),
    [
        (int32(), int32(0), InvalidArgument, "has 0 slots, and the target wants slot 0"),
        (int32(-1), int32(0), NotOffered, "slot 0, which is a hole"),
        (int32(0, 1), int32(2, 2), InvalidArgument, "block 2 appears twice"),
        (int32(5), int32(0), InvalidArgument, "source block 5 is outside"),
        (int32(0), int32(5), InvalidArgument, "target block 5 is outside"),
        (int32(0), int32(-2), InvalidArgument, "entry 0 of the target table is -2"),
    ],
)
def test_tables_of_slots_that_cannot_be_right_are_refused(source, target, error, said):
    template = compile_template(state().layout, state().layout)
    with pytest.raises(error, match=said):
        Plan(template, [source], [target], end_token=1)


def test_scales_of_k_and_v_are_components_of_their_own():
    fused = KVCache.from_tensors(
        {"l0": tensor(2, 5, 4, 3)}, axes="kv block token head", block_tokens=4, component="scale", group="scales"
    )
    apart = KVCache.from_tensors(
        {"l0": {"k": tensor(5, 3, 4), "v": tensor(5, 3, 4)}},
        axes="block head token",
        block_tokens=4,
        component="scale",
        group="scales",
    )
    assert [part.component for part in fused.layout.parts] == ["k_scale", "v_scale"]
    assert [(part.head_count, part.head_dim, part.dim_stride) for part in fused.layout.parts] == [(3, 1, 0)] * 2
    template = compile_template(fused.layout, apart.layout)
    assert template.token_bytes("scales") == 2 * 3 * 2


def test_one_scale_a_token_may_have_neither_heads_nor_a_dimension():
    cache = KVCache.from_tensors({"l0": tensor(5, 4)}, axes="block token", block_tokens=4, component="scale")
    (part,) = cache.layout.parts
    assert (part.component, part.head_count, part.head_dim) == ("scale", 1, 1)


def test_latents_may_have_heads():
    cache = KVCache.from_tensors(
        {"l0": tensor(5, 4, 2, 8)}, axes="block token head dim", block_tokens=4, component="latent"
    )
    assert [(part.component, part.head_count) for part in cache.layout.parts] == [("latent", 2)]


@pytest.mark.parametrize(
    ("tensors", "options", "said"),
    [
        (tensor(5, 8), {"axes": "slot"}, "'dim' is missing"),
        (tensor(5, 8), {"axes": "dim"}, "'block' is missing"),
        (tensor(5, 4, 8), {"axes": "slot token dim"}, "no axis 'token'"),
        (tensor(5, 4, 8), {"axes": "slot block dim"}, "no axis 'block'"),
        (tensor(5, 2, 8), {"axes": "slot kv dim"}, "no axis 'kv'"),
        (tensor(5, 8), {"axes": "slot dim", "block_tokens": 4}, "a slot holds no tokens"),
        (tensor(5, 8), {"axes": "slot dim", "window": 4}, "neither tokens nor a window"),
        (tensor(5, 8), {"axes": "slot dim", "component": "scale"}, "hold the component 'state'"),
        ({"k": tensor(5, 8), "v": tensor(5, 8)}, {"axes": "slot dim"}, r"one tensor, not \['k', 'v'\]"),
        (tensor(5, 4, 8), {"axes": "block token dim"}, "axes has a block axis: give block_tokens"),
        (tensor(5, 4, 8), {"axes": "block token dim", "block_tokens": 4, "component": "state"}, "needs a slot axis"),
        (tensor(5, 4, 8), {"axes": "block token dim", "block_tokens": 4, "component": "q"}, "not 'q'"),
        (tensor(5, 4), {"axes": "block token", "block_tokens": 4}, "'dim' is missing"),
        (tensor(2, 5, 4, 8), {"axes": "kv block token dim", "block_tokens": 4, "component": "latent"}, "no kv axis"),
        (
            {"k": tensor(5, 4, 8), "v": tensor(5, 4, 8)},
            {"axes": "block token dim", "block_tokens": 4, "component": "latent"},
            "one tensor",
        ),
    ],
)
def test_descriptions_that_contradict_themselves_are_refused(tensors, options, said):
    with pytest.raises(InvalidArgument, match=said):
        KVCache.from_tensors({"l0": tensors}, **options)


def over(memory, group, *, layer="l0", axes=AXES, tokens=4, **options):
    return KVCache.from_tensors({layer: memory}, axes=axes, block_tokens=tokens, group=group, **options)


@pytest.mark.parametrize("axes", ["kv block token head dim", "block kv token head dim", "block token kv head dim"])
def test_groups_may_share_their_bytes_if_they_say_so(axes):
    sizes = {"kv": 2, "block": 6, "token": 4, "head": 2, "dim": 8}
    memory = tensor(*(sizes[axis] for axis in axes.split()))
    full, near = over(memory, "full", axes=axes), over(memory, "near", axes=axes, layer="n0", window=5)
    with pytest.raises(InvalidArgument, match="share bytes"):
        KVCache.join(full, near)
    cache = KVCache.join(full, near, shared=True)
    assert [group.block_pool for group in cache.layout.groups] == ["full", "full"]
    assert len(cache.regions) == 1
    assert cache.within_allocations(lambda address: None).layout == cache.layout


def test_a_block_of_a_pool_may_be_cut_in_another_way_by_each_group():
    memory = tensor(6, 64)
    kv = over(memory.reshape(6, 2, 4, 2, 4), "full", axes="block kv token head dim")
    slots = KVCache.from_tensors({"s0": memory[:, :50]}, axes="slot dim", group="state")
    cache = KVCache.join(kv, slots, shared=True)
    template = compile_template(cache.layout, cache.layout)
    plan = Plan(template, [int32(1, 2), int32(3)], [int32(4, 5), int32(0)], end_token=8)
    assert plan.total_bytes == 8 * 2 * 2 * 4 * 2 + 50 * 2


def test_blocks_of_different_numbers_never_share_bytes():
    memory = tensor(7 * 128)
    first = memory[: 6 * 128].reshape(6, 2, 4, 2, 8)
    moved = memory[64 : 64 + 6 * 128].reshape(6, 2, 4, 2, 8)
    axes = "block kv token head dim"
    with pytest.raises(InvalidArgument, match="share bytes of different blocks"):
        KVCache.join(over(first, "full", axes=axes), over(moved, "near", axes=axes, layer="n0"), shared=True)


def test_groups_of_a_pool_have_blocks_of_one_number_and_stride():
    memory = tensor(6, 2, 4, 2, 8)
    axes = "block kv token head dim"
    with pytest.raises(InvalidArgument, match="6 blocks for one and 5 for the other"):
        KVCache.join(over(memory, "full", axes=axes), over(memory[:5], "near", axes=axes, layer="n0"), shared=True)
    halves = memory.reshape(-1)[: 6 * 64].reshape(6, 2, 2, 2, 8)
    with pytest.raises(InvalidArgument, match="share bytes of different blocks"):
        KVCache.join(
            over(memory, "full", axes=axes), over(halves, "near", axes=axes, layer="n0", tokens=2), shared=True
        )


def test_layers_of_one_group_share_no_bytes_in_a_pool_either():
    memory = tensor(2, 6, 4, 2, 8)
    full = over(memory, "full")
    both = KVCache.join(full, over(memory, "near", layer="n0"), shared=True)
    twice = type(both.layout)(
        groups=both.layout.groups,
        parts=tuple(part for part in both.layout.parts if part.group == "full")
        + tuple(msgspec.structs.replace(part, layer="other") for part in both.layout.parts if part.group == "full"),
        region_bytes=both.layout.region_bytes,
    )
    with pytest.raises(InvalidArgument, match="share bytes"):
        validate_layout(twice)


def test_pools_of_joined_caches_stay_apart():
    one, two = tensor(2, 6, 4, 2, 8), tensor(2, 6, 4, 2, 8)
    left = KVCache.join(over(one, "a"), over(one, "b", layer="l1"), shared=True)
    right = KVCache.join(over(two, "c", layer="l2"), over(two, "d", layer="l3"), shared=True)
    cache = KVCache.join(left, right)
    assert [group.block_pool for group in cache.layout.groups] == ["a", "a", "c", "c"]
    template = compile_template(cache.layout, cache.layout)
    tables = [int32(0), int32(1), int32(1), int32(0)]
    assert Plan(template, tables, tables, end_token=4).total_bytes == 4 * 4 * 2 * 2 * 8 * 2


def test_two_groups_of_a_pool_cannot_write_one_block():
    memory = tensor(2, 6, 4, 2, 8)
    shared = KVCache.join(over(memory, "full"), over(memory, "near", layer="n0", window=5), shared=True).layout
    apart = KVCache.join(
        over(tensor(2, 6, 4, 2, 8), "full"), over(tensor(2, 6, 4, 2, 8), "near", layer="n0", window=5)
    ).layout
    template = compile_template(apart, shared)
    sources = [int32(0, 1, 2), int32(0, 1, 2)]
    with pytest.raises(
        InvalidArgument, match="block 3 appears in group full and in group near, which share one block pool"
    ):
        Plan(template, sources, [int32(5, 4, 3), int32(0, 1, 3)], end_token=12)
    # The first block of the window's group is not written: another group may have it by now.
    assert Plan(template, sources, [int32(5, 4, 3), int32(5, 1, 0)], end_token=12).total_bytes
    # A source's groups may lie in one block pool and are only read.
    assert Plan(compile_template(shared, apart), sources, sources, end_token=12).total_bytes
