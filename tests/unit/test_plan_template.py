"""compile_template: pairing by name and global index, and refusals that name the field and both values."""

import msgspec
import numpy as np
import pytest

from kvlink._native import Plan, Template
from kvlink.errors import InvalidArgument, LayoutMismatch
from kvlink.layout import CacheLayout, KVCache
from kvlink.plan import compile_template

AXES = "kv block token head dim"


def cache(layers=("l0", "l1"), *, blocks=4, tokens=2, heads=range(4), total=4, dim=8, dtype=np.float16, **options):
    memory = {layer: np.zeros((2, blocks, tokens, len(heads), dim), dtype) for layer in layers}
    return KVCache.from_tensors(
        memory, axes=AXES, block_tokens=tokens, heads=heads, total_kv_heads=total, **options
    ).layout


def latent_cache(layers=("l0", "l1")):
    memory = {layer: np.zeros((4, 2, 8), np.float16) for layer in layers}
    return KVCache.from_tensors(memory, axes="block token dim", block_tokens=2).layout


def with_parts(layout, **change):
    return msgspec.structs.replace(
        layout, parts=tuple(msgspec.structs.replace(part, **change) for part in layout.parts)
    )


def test_a_template_knows_what_it_moves():
    template = compile_template(cache(), cache(("l1", "l0")))
    assert isinstance(template, Template)
    assert template.layers == ["l1", "l0"]
    assert template.groups == ["full"]
    assert template.op_count == 4
    assert template.token_bytes("full") == 2 * 2 * 4 * 8 * 2
    with pytest.raises(InvalidArgument, match="no group called other"):
        template.token_bytes("other")


def test_layers_are_paired_by_name_and_not_by_position():
    template = compile_template(cache(("l0", "l1")), cache(("l1", "l0")))
    plan = Plan(template, [np.array([0], np.int32)], [np.array([0], np.int32)], end_token=1)
    assert plan.copies()[:, :2].tolist() == [[1, 0], [1, 0], [0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (cache(tokens=2), cache(tokens=3)),
        (cache(blocks=4), cache(blocks=9)),
        (cache(("l0", "l1", "l2")), cache(("l2",))),
        (cache(heads=range(8), total=8), cache(heads=range(2, 4), total=8)),
        (cache(model="m"), cache()),
        (cache(model="m"), cache(model="m")),
        (cache(window=4), cache(window=4)),
        (latent_cache(), latent_cache()),
    ],
    ids=["block size", "blocks", "pipeline stage", "heads", "one model", "same model", "window", "latents"],
)
def test_these_pairs_are_served(source, target):
    assert compile_template(source, target).op_count == len(target.parts)


@pytest.mark.parametrize(
    ("source", "target", "field", "values"),
    [
        (cache(model="m1"), cache(model="m2"), "model", ("m1", "m2")),
        (cache(group="a"), cache(group="b"), "groups", ("a", "b")),
        (cache(window=4), cache(window=8), "window of group full", ("4", "8")),
        (cache(window=4), cache(), "window of group full", ("4", "None")),
        (cache(("l0",)), cache(), "layers of group full", ("l0", "l0, l1")),
        (latent_cache(), cache(), "components of l0", ("latent", "k, v")),
        (cache(dim=8), cache(dim=16), "head_dim", ("8", "16")),
        (cache(), cache(total=8), "total_kv_heads", ("4", "8")),
        (cache(dtype=np.float16), cache(dtype=np.int16), "dtype", ("float16", "int16")),
        (cache(dtype="f4"), with_parts(cache(dtype="f2"), dtype="float32"), "element_bytes", ("4", "2")),
        (
            cache(heads=range(2), total=4),
            cache(heads=range(1, 4), total=4),
            "heads of k of l0",
            (r"0\.\.1 of 4", r"1\.\.3 of 4"),
        ),
    ],
)
def test_a_pair_that_differs_is_refused_with_field_and_both_values(source, target, field, values):
    advice = "; kvlink does not convert such elements.*" if field in ("dtype", "element_bytes") else ""
    said = f"{field}.* differs?: the source has {values[0]}, the target has {values[1]}{advice}$"
    with pytest.raises(LayoutMismatch, match=said):
        compile_template(source, target)


def test_a_refusal_of_many_layers_stays_short():
    names = [f"layers.{i:02d}" for i in range(60)]
    with pytest.raises(LayoutMismatch, match="and 53 more, the target has .* and 54 more") as caught:
        compile_template(cache(names[:-1]), cache(names))
    assert len(str(caught.value)) < 300


def test_the_heads_of_a_target_may_come_from_several_parts_of_the_source():
    lower, upper = cache(heads=range(2), total=4), cache(heads=range(2, 4), total=4)
    shifted = tuple(msgspec.structs.replace(part, region=part.region + 2) for part in upper.parts)
    source = CacheLayout(
        groups=lower.groups, parts=lower.parts + shifted, region_bytes=lower.region_bytes + upper.region_bytes
    )
    template = compile_template(source, cache(heads=range(1, 4), total=4))
    assert template.op_count == 8
    plan = Plan(template, [np.array([0], np.int32)], [np.array([1], np.int32)], end_token=2)
    assert plan.total_bytes == 2 * 2 * 2 * 3 * 8 * 2


def test_groups_are_paired_by_name():
    full = KVCache.from_tensors({"a": np.zeros((2, 4, 2, 1, 8), "f2")}, axes=AXES, block_tokens=2)
    near = KVCache.from_tensors(
        {"b": np.zeros((2, 5, 3, 1, 8), "f2")}, axes=AXES, block_tokens=3, group="near", window=2
    )
    template = compile_template(KVCache.join(full, near).layout, KVCache.join(near, full).layout)
    assert template.groups == ["near", "full"]
    near_table, full_table = np.array([-1, 4], np.int32), np.array([3, 1, 0], np.int32)
    plan = Plan(template, [near_table, full_table], [near_table, full_table], end_token=5)
    assert plan.describe(0, plan.total_bytes) == [
        ("near", "b", "k", 0, 1, 3, 5),
        ("near", "b", "v", 0, 1, 3, 5),
        ("full", "a", "k", 0, 1, 0, 5),
        ("full", "a", "v", 0, 1, 0, 5),
    ]


GROUP = ("full", (0, 0, 2, 2, 4, 4, 0))
OP = ((0, 0, 0, 0, 1, 8, 2), (0, 0, 32, 16, 0, 2), (0, 0, 32, 16, 0, 2))


def native(*, op=OP, group=GROUP, source_bytes=(128,), target_bytes=(128,)):
    return Template(
        ops=[op],
        groups=[group],
        layers=["l0"],
        source_region_bytes=list(source_bytes),
        target_region_bytes=list(target_bytes),
    )


def op_with(what=None, source=None, target=None):
    return (what or OP[0], source or OP[1], target or OP[2])


BIG = (1 << 64) - 1


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"source_bytes": (127,)}, "the source of op 0 ends at byte 128 of a region of 127"),
        ({"target_bytes": (127,)}, "the target of op 0 ends at byte 128"),
        ({"op": op_with(source=(1, 0, 32, 16, 0, 2))}, "region 1 of 1"),
        ({"op": op_with(source=(0, BIG, 32, 16, 0, 2))}, "overflows 64 bits"),
        ({"op": op_with(target=(0, 0, BIG, 16, 0, 2))}, "overflows 64 bits"),
        ({"op": op_with(target=(0, 0, 1 << 63, 16, 0, 2))}, "overflows 64 bits"),
        ({"op": op_with(source=(1 << 32, 0, 32, 16, 0, 2))}, "overflows 32 bits"),
        ({"op": op_with(what=(1, 0, 0, 0, 1, 8, 2))}, "in group 1"),
        ({"op": op_with(what=(0, 1, 0, 0, 1, 8, 2))}, "of layer 1"),
        ({"op": op_with(what=(0, 0, 7, 0, 1, 8, 2))}, "of component 7"),
        ({"op": op_with(what=(0, 0, 0, 0, 0, 8, 2))}, "has no bytes"),
        ({"op": op_with(what=(0, 0, 0, 0, (1 << 32) - 1, (1 << 32) - 1, 2))}, "overflows|more than 1 GiB"),
        ({"op": op_with(what=(0, 0, 0, 0, 1, 1 << 31, 2))}, "more than 1 GiB"),
        ({"op": op_with(what=(0, 0, 0, (1 << 32) - 1, 1, 8, 2))}, "heads that overflow 32 bits"),
        ({"group": ("full", (0, 0, 0, 2, 4, 4, 0))}, "blocks of 0 tokens"),
        ({"group": ("full", (0, 0, 2, 2, 0, 4, 0))}, "has no blocks"),
        ({"group": ("full", (0, 0, 2, 2, 4, 1 << 31, 0))}, "more blocks than a table entry can name"),
        ({"group": ("full", (0, 0, 2, 2, 4, 4, 0, 1, 0))}, "neither tokens nor a window"),
        ({"group": ("full", (0, 0, 1, 1, 4, 4, 8, 1, 0))}, "neither tokens nor a window"),
        ({"group": ("full", (0, 0, 2, 2, 4, 4, 0, 0, 1))}, "a block pool that does not exist"),
        ({"group": ("full", (0, 0, 2, 2, 4, 4, 0, 0))}, "group full has 8 numbers"),
    ],
)
def test_the_native_core_trusts_no_number(arguments, reason):
    with pytest.raises(InvalidArgument, match=reason):
        native(**arguments)
