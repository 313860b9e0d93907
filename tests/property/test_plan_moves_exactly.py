"""Executing a plan moves the elements that a NumPy reference moves, and not one byte else.

Both sides are random: axis orders, K and V fused or apart, a layer axis, padding, block sizes, heads, windows, block
tables with holes, prefixes and lengths around the block edges. Elements carry their global coordinate.
"""

import ctypes
import math
import random
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlink._native import Plan
from kvlink.layout import KVCache
from kvlink.plan import compile_template

#: What targets hold before anything moves; `fill_with_coordinates` writes other numbers.
NOISE = np.random.default_rng(0).integers(1 << 15, 1 << 16, 1 << 16)
DTYPES = (np.uint16, np.int32, np.int64)


# A case follows from one number, which hypothesis draws and prints: having it draw every choice takes most of the time.
SEEDS = st.integers(0, (1 << 64) - 1)


@dataclass
class Model:
    """What both sides agree on."""

    layers: list[str]
    heads: int  # 0: replicated latents without a head axis
    dim: int
    dtype: type
    window: int | None


@dataclass
class Side:
    """One cache, and a view of each component with dimensions (block, token, head, dim)."""

    cache: KVCache
    views: dict[tuple[str, str], np.ndarray]
    backings: list[np.ndarray]
    heads: range
    block_tokens: int
    num_blocks: int


def shuffled(rng, items):
    items = list(items)
    return rng.sample(items, len(items))


def strided(rng, sizes, axes, dtype):
    """Return memory with padding somewhere, its used part, and the backing."""
    shape = [sizes[axis] for axis in axes]
    padded = rng.randrange(len(axes))
    step, extra = rng.choice([(1, 0), (1, 1), (2, 0)])
    shape[padded] = shape[padded] * step + extra
    size, start = math.prod(shape), rng.randrange(NOISE.size // 2)
    assert size <= NOISE.size // 2
    backing = NOISE[start : start + size].reshape(shape).astype(dtype)
    index = [slice(None)] * len(axes)
    index[padded] = slice(extra, None, step)
    return backing[tuple(index)], backing


def canonical(tensor, axes, picked):
    """Return one component of one layer with dimensions (block, token, head, dim)."""
    order = list(axes)
    for axis, index in picked.items():
        if axis in order:
            tensor = np.moveaxis(tensor, order.index(axis), 0)[index]
            order.remove(axis)
    tensor = tensor.transpose([order.index(axis) for axis in ("block", "token", "head", "dim") if axis in order])
    return tensor if "head" in order else tensor[:, :, None]


def draw_side(rng, model, heads, layers):
    block_tokens = rng.randint(1, 7)
    num_blocks = rng.randint(1, 6)
    sizes = {
        "layer": len(layers), "kv": 2, "block": num_blocks, "token": block_tokens, "head": len(heads), "dim": model.dim
    }  # fmt: skip
    names = {"block", "token", "dim"} | ({"head"} if model.heads else set())
    fused = bool(model.heads) and rng.random() < 0.5
    one_tensor = rng.random() < 0.5
    names |= ({"kv"} if fused else set()) | ({"layer"} if one_tensor else set())
    axes = shuffled(rng, sorted(names))
    components = ("k", "v") if model.heads else ("latent",)
    tensors, views, backings = {}, {}, []
    for name in ["all"] if one_tensor else layers:
        made = {}
        for piece in ["kv"] if fused else components:
            made[piece], backing = strided(rng, sizes, axes, model.dtype)
            backings.append(backing)
            for i, layer in enumerate(layers if one_tensor else [name]):
                for j, component in enumerate(components if fused else [piece]):
                    views[layer, component] = canonical(made[piece], axes, {"layer": i, "kv": j})
        tensors[name] = made if set(made) == {"k", "v"} else made["kv" if fused else "latent"]
    cache = KVCache.from_tensors(
        tensors,
        axes=" ".join(axes),
        block_tokens=block_tokens,
        heads=heads if model.heads else None,
        total_kv_heads=model.heads or None,
        layers=layers if one_tensor else None,
        window=model.window,
    )
    return Side(cache, views, backings, heads, block_tokens, num_blocks)


def draw_heads(rng, total):
    """A source's heads and the target's, inside them."""
    source = sorted(rng.sample(range(total + 1), 2))
    target = sorted(rng.sample(range(source[0], source[1] + 1), 2))
    return range(*source), range(*target)


def draw_case(rng):
    model = Model(
        layers=[f"l{i}" for i in range(rng.randint(1, 3))],
        heads=rng.choice([0, 1, 2, 4]),
        dim=rng.randint(1, 5),
        dtype=rng.choice(DTYPES),
        window=rng.choice([None, None, 1, 5]),
    )
    source_heads, target_heads = draw_heads(rng, model.heads) if model.heads else (range(1), range(1))
    source = draw_side(rng, model, source_heads, shuffled(rng, model.layers))
    wanted_layers = model.layers[: rng.randint(1, len(model.layers))]
    target = draw_side(rng, model, target_heads, shuffled(rng, wanted_layers))
    most = min(source.num_blocks * source.block_tokens, target.num_blocks * target.block_tokens)
    edges = {0, 1, most} | {
        n * b + d for b in (source.block_tokens, target.block_tokens) for n in (1, 2) for d in (-1, 0, 1)
    }
    edge = rng.choice(sorted(n for n in edges if 0 <= n <= most))
    num_tokens = rng.choice([edge, rng.randint(0, most), most])
    skip = rng.choice([0, 0, rng.randint(0, num_tokens)])
    first = max(skip, num_tokens - model.window) if model.window else skip
    target_table = [block if rng.random() < 0.8 else -1 for block in shuffled(rng, range(target.num_blocks))]
    wanted = [t for t in range(first, num_tokens) if target_table[t // target.block_tokens] != -1]
    source_table = shuffled(rng, range(source.num_blocks))
    needed = {t // source.block_tokens for t in wanted}
    source_table = [b if i in needed or rng.random() < 0.5 else -1 for i, b in enumerate(source_table)]
    return model, source, target, source_table, target_table, skip, num_tokens, wanted


def fill_with_coordinates(model, side, table, num_tokens):
    for (layer, component), view in side.views.items():
        for token in range(num_tokens):
            block = table[token // side.block_tokens]
            if block == -1:
                continue
            for i, head in enumerate(side.heads):
                tag = (((model.layers.index(layer) * 3 + len(component)) * 41 + token) * 5 + head) * 5
                view[block, token % side.block_tokens, i] = tag + (ord(component[0]) & 1) * 20011 + np.arange(model.dim)


def move_by_reference(source, target, source_table, target_table, wanted):
    for key, view in target.views.items():
        for token in wanted:
            from_block = source.views[key][source_table[token // source.block_tokens], token % source.block_tokens]
            into = view[target_table[token // target.block_tokens], token % target.block_tokens]
            for head in target.heads:
                into[head - target.heads.start] = from_block[head - source.heads.start]


def regions_of(cache):
    return [np.frombuffer((ctypes.c_uint8 * r.nbytes).from_address(r.address), np.uint8) for r in cache.regions]


def execute(rows, sources, targets):
    for row in rows.tolist():
        source_region, target_region, source_at, target_at, size, inner, outer, si, ti, so, to = row
        for o in range(outer):
            for i in range(inner):
                source = source_at + o * so + i * si
                target = target_at + o * to + i * ti
                assert source + size <= sources[source_region].size
                assert target + size <= targets[target_region].size
                targets[target_region][target : target + size] = sources[source_region][source : source + size]


def slices(total, cuts):
    edges = sorted({0, total, *(cut % (total + 1) for cut in cuts)})
    return list(zip(edges, edges[1:], strict=False))


def planned(case):
    model, source, target, source_table, target_table, skip, num_tokens, wanted = case
    template = compile_template(source.cache.layout, target.cache.layout)
    tables = [np.array(source_table, np.int32)], [np.array(target_table, np.int32)]
    plan = Plan(template, *tables, first_token=skip, end_token=num_tokens)
    element = np.dtype(model.dtype).itemsize
    assert plan.total_bytes == len(wanted) * len(target.views) * len(target.heads) * model.dim * element
    return template, plan


@settings(max_examples=400, deadline=None)
@given(SEEDS)
def test_a_plan_moves_what_the_reference_moves(seed):
    rng = random.Random(seed)
    case = draw_case(rng)
    cuts = [rng.randrange(1 << 16) for _ in range(rng.randint(0, 4))]
    way = rng.choice(["direct", "packed", "one sided"])
    model, source, target, source_table, target_table, _, num_tokens, wanted = case
    fill_with_coordinates(model, source, source_table, num_tokens)
    template, plan = planned(case)
    before = [backing.copy() for backing in target.backings]
    move_by_reference(source, target, source_table, target_table, wanted)
    expected = [backing.copy() for backing in target.backings]
    for backing, old in zip(target.backings, before, strict=True):
        backing[...] = old

    sender = Plan.one_sided(template, plan, "source") if way == "one sided" else plan
    receiver = Plan.one_sided(template, plan, "target") if way == "one sided" else plan
    assert sender.total_bytes == receiver.total_bytes == plan.total_bytes
    for begin, end in slices(plan.total_bytes, cuts):
        if way == "direct":
            execute(plan.copies(begin, end), regions_of(source.cache), regions_of(target.cache))
            continue
        packed = [np.zeros(end - begin, np.uint8)]
        execute(sender.copies(begin, end, packed="target"), regions_of(source.cache), packed)
        execute(receiver.copies(begin, end, packed="source"), packed, regions_of(target.cache))

    for backing, wanted_bytes in zip(target.backings, expected, strict=True):
        np.testing.assert_array_equal(backing, wanted_bytes)


@settings(max_examples=100, deadline=None)
@given(SEEDS)
def test_what_did_not_arrive_is_named_and_the_prefix_before_it_is_right(seed):
    rng = random.Random(seed)
    case = draw_case(rng)
    left, right = (rng.choice([0, rng.randrange(1 << 16)]) for _ in range(2))
    _, source, target, _, target_table, _, num_tokens, wanted = case
    _, plan = planned(case)
    begin, end = sorted((left % (plan.total_bytes + 1), right % (plan.total_bytes + 1)))
    described = plan.describe(begin, end)
    prefix = plan.valid_prefix_tokens([(begin, end)], num_tokens=num_tokens)
    named = {
        (layer, c, head, token)
        for _, layer, c, first_head, end_head, first, stop in described
        for head in range(first_head, end_head)
        for token in range(first, stop)
    }
    assert {token for *_, token in named} <= set(wanted)
    assert prefix == min((token for *_, token in named), default=num_tokens)
    if begin == end:
        assert not described
    if end - begin == plan.total_bytes:
        assert named == {(*key, head, token) for key in target.views for head in target.heads for token in wanted}
    assert touched(plan, begin, end, source, target, target_table, wanted) <= named


def touched(plan, begin, end, source, target, table, wanted):
    """The (layer, component, head, token) of the target that bytes [begin, end) of the stream change."""
    for backing in source.backings:
        backing[...] = 1
    for backing in target.backings:
        backing[...] = 0
    execute(plan.copies(begin, end), regions_of(source.cache), regions_of(target.cache))
    return {
        (*key, head, token)
        for key, view in target.views.items()
        for token in wanted
        for head, elements in zip(
            target.heads, view[table[token // target.block_tokens], token % target.block_tokens], strict=True
        )
        if elements.any()
    }
