"""select: who delivers what of a target that draws from several sources."""

import msgspec
import numpy as np
import pytest

from kvlink._native import Plan
from kvlink.errors import InvalidArgument, LayoutMismatch
from kvlink.layout import CacheLayout, KVCache, validate_layout
from kvlink.plan import compile_template, select

AXES = "kv block token head dim"


def rank(heads=range(8), *, total=8, layers=("l0", "l1"), dim=4, dtype=np.uint16, group="full", **options):
    memory = {layer: np.zeros((2, 3, 4, len(heads), dim), dtype) for layer in layers}
    return KVCache.from_tensors(
        memory, axes=AXES, block_tokens=4, heads=heads, total_kv_heads=total, group=group, **options
    ).layout


def latents(layers=("l0", "l1")):
    memory = {layer: np.zeros((3, 4, 8), np.uint16) for layer in layers}
    return KVCache.from_tensors(memory, axes="block token dim", block_tokens=4).layout


def tensor_parallel(degree, *, total=8, **options):
    if degree <= total:
        share = total // degree
        return [rank(range(i * share, (i + 1) * share), total=total, **options) for i in range(degree)]
    return [rank(range(i * total // degree, i * total // degree + 1), total=total, **options) for i in range(degree)]


def heads_of(layout):
    return [(part.layer, part.component, part.head_start, part.head_count) for part in layout.parts]


def test_one_source_delivers_the_whole_target():
    target = rank(range(2, 4))
    assert select([rank()], target, seed=3) == [target]


def test_heads_come_from_the_ranks_that_hold_them():
    taken = select(tensor_parallel(4), rank(range(2, 6), layers=("l0",)), seed=0)
    assert [heads_of(layout) for layout in taken] == [
        [],
        [("l0", "k", 2, 2), ("l0", "v", 2, 2)],
        [("l0", "k", 4, 2), ("l0", "v", 4, 2)],
        [],
    ]


def test_what_is_taken_is_the_same_bytes_of_the_same_memory():
    target = rank(range(2, 8))
    taken = select(tensor_parallel(4), target, seed=0)
    for layout in taken:
        validate_layout(layout)
        assert (layout.groups, layout.region_bytes, layout.model) == (target.groups, target.region_bytes, target.model)
    whole = target.parts[0]
    last = taken[3].parts[0]
    assert (last.head_start, last.head_count) == (6, 2)
    assert last.offset == whole.offset + (6 - 2) * whole.head_stride
    assert last == msgspec.structs.replace(whole, head_start=6, head_count=2, offset=last.offset)
    (one,) = {part.head_stride for part in select(tensor_parallel(8), target, seed=0)[3].parts}
    assert one == 0


def test_layers_come_from_the_stages_that_hold_them():
    stages = [rank(layers=("l0",)), rank(layers=("l1", "l2", "l3"))]
    taken = select(stages, rank(layers=("l3", "l0", "l2")), seed=0)
    assert [[part.layer for part in layout.parts[::2]] for layout in taken] == [["l0"], ["l3", "l2"]]


@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_replicas_take_turns_with_the_seed(replicas):
    elected = []
    for seed in range(100, 100 + 2 * replicas):
        taken = select([latents()] * replicas, latents(), seed=seed)
        delivering = [i for i, layout in enumerate(taken) if layout.parts]
        assert len(delivering) == 1, "what several hold alike comes from one of them"
        assert taken[delivering[0]] == latents()
        elected += delivering
    assert sorted(elected) == sorted([*range(replicas)] * 2)
    assert elected[:replicas] == elected[replicas:]


def test_each_head_has_its_own_replicas():
    for seed in range(4):
        taken = select(tensor_parallel(8, total=2), rank(range(2), total=2, layers=("l0",)), seed=seed)
        assert [i for i, layout in enumerate(taken) if layout.parts] == [seed, 4 + seed]


def test_a_part_that_one_source_delivers_is_not_cut_where_another_begins():
    sources = [rank(range(8)), rank(range(4)), rank(range(4, 8))]
    assert select(sources, rank(), seed=0) == [rank(), *[msgspec.structs.replace(rank(), parts=())] * 2]
    assert [len(layout.parts) for layout in select(sources, rank(), seed=1)] == [0, 4, 4]


def test_a_replica_that_nobody_needs_compiles_to_nothing():
    source, taken = rank(), msgspec.structs.replace(rank(), parts=())
    validate_layout(taken)
    template = compile_template(source, taken)
    assert (template.op_count, template.layers, template.groups) == (0, [], ["full"])
    assert template.token_bytes("full") == 0
    table = [np.array([0, 2], np.int32)]
    plan = Plan(template, table, table, end_token=7)
    assert plan.total_bytes == 0
    assert plan.copies().shape == (0, 11)
    assert plan.describe(0, 100) == []
    assert plan.valid_prefix_tokens([(0, 100)], num_tokens=7) == 7


def test_a_source_may_lack_groups_and_they_keep_their_places():
    near = KVCache.from_tensors({"n0": np.zeros((2, 3, 4, 8, 4), np.uint16)}, axes=AXES, block_tokens=4, group="near")
    full = KVCache.from_tensors({"l0": np.zeros((2, 5, 2, 8, 4), np.uint16)}, axes=AXES, block_tokens=2)
    target = KVCache.join(near, full).layout
    taken = select([full.layout, near.layout], target, seed=0)
    assert [[part.group for part in layout.parts[::2]] for layout in taken] == [["full"], ["near"]]
    template = compile_template(full.layout, taken[0])
    assert template.groups == ["near", "full"]
    assert (template.token_bytes("near"), template.token_bytes("full")) == (0, 2 * 8 * 4 * 2)
    nothing, table = np.empty(0, np.int32), np.array([1, 0], np.int32)
    plan = Plan(template, [nothing, table], [table, table], end_token=4)
    assert {group for group, *_ in plan.describe(0, plan.total_bytes)} == {"full"}
    assert plan.total_bytes == 4 * 2 * 8 * 4 * 2


def test_equal_arguments_give_equal_layouts():
    arguments = tensor_parallel(8, total=2), rank(range(2), total=2)
    assert select(*arguments, seed=5) == select(*arguments, seed=5)


@pytest.mark.parametrize(
    ("sources", "target", "said"),
    [
        (tensor_parallel(4)[:3], rank(), "heads of k of l0 in group full differ: the sources have 0..5 of 8, "),
        ([rank(range(2)), rank(range(4, 8))], rank(), "have 0..1, 4..7 of 8, the target has 0..7 of 8"),
        ([rank(range(2))], rank(), "the source has 0..1 of 8, the target has 0..7 of 8"),
        ([rank(layers=("l0",)), rank(layers=("l2",))], rank(), "layers of group full differ: the sources have l0, l2"),
        ([rank(group="a"), rank(group="b")], rank(), "groups differ: the sources have a, b, the target has full"),
        ([latents(), latents()], rank(), "components of l0 in group full differ: the sources have latent, the"),
        (
            [rank(), rank(dim=8)],
            rank(),
            "head_dim of k of l0 in group full differs: the source has 8, the target has 4",
        ),
        ([rank(), rank(window=8)], rank(), "window of group full differs: the source has 8, the target has None"),
        ([rank(model="m1"), rank(model="m2")], rank(model="m1"), "model differs: the source has m2, the target has m1"),
        ([rank(), rank(dtype="f2")], rank(), "dtype of k of l0 in group full differs: the source has float16"),
    ],
)
def test_what_nobody_holds_or_somebody_holds_unlike_is_named(sources, target, said):
    with pytest.raises(LayoutMismatch) as caught:
        select(sources, target, seed=1)
    assert said in str(caught.value)
    assert said.startswith(caught.value.field) or caught.value.field == "heads"
    assert caught.value.source_value in str(caught.value)
    assert caught.value.target_value in str(caught.value)


def test_there_must_be_a_source():
    with pytest.raises(InvalidArgument, match="at least one source"):
        select([], rank(), seed=0)


def test_sources_made_to_burn_time_cost_little():
    """Every other head in a part of its own, from many sources, against one part of all heads."""
    part = rank(range(1), total=1).parts[0]
    total = 1 << 14
    parts = tuple(
        msgspec.structs.replace(part, head_start=head, total_kv_heads=total, offset=0) for head in range(0, total, 2)
    )
    source = CacheLayout(groups=rank().groups, parts=parts, region_bytes=(1 << 20,))
    wanted = msgspec.structs.replace(part, head_count=total, total_kv_heads=total, head_stride=8)
    target = CacheLayout(groups=rank().groups, parts=(wanted,), region_bytes=(1 << 40,))
    with pytest.raises(LayoutMismatch, match="and 8186 more of 16384"):
        select([source] * 8, target, seed=0)
