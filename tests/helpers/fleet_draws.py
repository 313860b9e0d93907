"""Random models, the fleets that hold them on both sides, and requests between them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from helpers.conversions import BITS, PAIRS
from helpers.element_tags import Request, Tables, wanted_tokens
from helpers.fleets import PAIRED, Fleet, Group, Rank

DEGREES = (1, 2, 4, 8)
BLOCK_SIZES = (1, 2, 3, 5, 8, 11, 16, 16, 32, 48, 64, 127, 128)
DTYPES = ("uint8", "uint16", "uint16", "uint32", "uint64")
# What the groups of a model are: kind, and whether a group has layers of its own, as many and as large ones as the
# first, or something that goes with the layers of the first.
MODELS: tuple[tuple[tuple[str, str], ...], ...] = (
    (("kv", "own"),),
    (("kv", "own"),),
    (("latent", "own"),),
    (("window", "own"),),
    (("kv", "own"), ("window", "alike")),
    (("kv", "own"), ("state", "own")),
    (("kv", "own"), ("kv_scale", "same")),
    (("latent", "own"), ("scale", "same")),
    (("window", "own"), ("state", "own"), ("latent", "own")),
)
SHARED_CHANCE = 0.4
UNLIKE_CHANCE = 0.2
CONVERT_CHANCE = 0.15


def draw_fleets(rng: np.random.Generator) -> tuple[Fleet, Fleet]:
    """A model laid out twice, sometimes unlike in something that no layout can bridge."""
    model = _model(rng)
    source, target = _fleet(model, rng), _fleet(model, rng)
    if rng.random() < 0.15 and not target.shared:
        target = _with_fewer_layers(target, rng)
    if rng.random() < CONVERT_CHANCE:
        source, target = _converted(source, target, rng)
    if rng.random() < UNLIKE_CHANCE:
        source, target = _unlike(source, target, rng)
    return source, target


def draw_request(sources: list[Rank], target: Rank, rng: np.random.Generator) -> Request:
    """Block tables in random order, a prefix that is there already, and holes on both sides."""
    ranks = [*sources, target]
    paged = [group for rank in ranks for group in rank.groups.values() if not group.slots]
    most = min((_capacity(rank) for rank in ranks), default=100)
    edges = {0, 1, most} | {n * group.block_tokens + d for group in paged for n in (1, 2) for d in (-1, 0, 1)}
    lengths = sorted(n for n in edges if 0 <= n <= most)
    num_tokens = int(rng.choice(lengths) if rng.random() < 0.5 else rng.integers(0, most + 1))
    skip_tokens = int(rng.choice([0, rng.integers(0, num_tokens + 1), num_tokens], p=[0.6, 0.35, 0.05]))
    hole_chance = float(rng.choice([0, 0.3]))
    target_tables = _tables(target, rng, hole_chance)
    wanted = {
        name: wanted_tokens(group, target_tables[name], skip_tokens=skip_tokens, num_tokens=num_tokens)
        for name, group in target.groups.items()
    }
    source_tables = []
    for rank in sources:
        tables = _tables(rank, rng, 0.0)
        for name, table in tables.items():
            tokens_of = 1 if rank.groups[name].slots else rank.groups[name].block_tokens
            unneeded = rng.random(len(table)) < 0.5
            unneeded[wanted.get(name, np.empty(0, np.int64)) // tokens_of] = False
            table[unneeded] = -1
        source_tables.append(tables)
    return Request(
        num_tokens=num_tokens, skip_tokens=skip_tokens, source_tables=source_tables, target_tables=target_tables
    )


def _shares_pool(rank: Rank) -> bool:
    return rank.cache.layout.groups[0].block_pool is not None


def _capacity(rank: Rank) -> int:
    """How many tokens fit into every group; those of one block pool get equal shares."""
    share = len(rank.groups) if _shares_pool(rank) else 1
    paged = [group for group in rank.groups.values() if not group.slots]
    return min((group.num_blocks // share * group.block_tokens for group in paged), default=100)


def _tables(rank: Rank, rng: np.random.Generator, hole_chance: float) -> Tables:
    tables = {}
    pool = rng.permutation(next(iter(rank.groups.values())).num_blocks).astype(np.int32)
    for i, (name, group) in enumerate(rank.groups.items()):
        if _shares_pool(rank):
            table = pool[i :: len(rank.groups)].copy()
        else:
            table = rng.permutation(group.num_blocks).astype(np.int32)
        table[rng.random(len(table)) < hole_chance] = -1
        tables[name] = table[:2].copy() if group.slots else table
    return tables


def _model(rng: np.random.Generator) -> list[Group]:
    shape = MODELS[rng.integers(len(MODELS))]
    names = iter(f"layers.{i}" for i in range(16))
    groups: list[Group] = []
    for i, (kind, whose) in enumerate(shape):
        count = len(groups[0].layers) if whose == "alike" else rng.integers(1, 4 if len(shape) > 1 else 5)
        own = tuple(next(names) for _ in range(count))
        heads = int(rng.choice(DEGREES)) if kind in ("kv", "window", "kv_scale", "state") else 0
        group = Group(
            name=f"{kind}-{i}",
            kind="kv" if kind == "window" else kind,
            layers=groups[0].layers if whose == "same" else own,
            heads=0 if kind == "state" and rng.random() < 0.3 else heads,
            dim=int(rng.integers(1, 6)),
            dtype=str(rng.choice(DTYPES)),
            window=int(rng.choice([1, 5, 16, 60])) if kind == "window" else None,
        )
        if whose == "alike":
            group = replace(group, heads=groups[0].heads, dim=groups[0].dim, dtype=groups[0].dtype)
        groups.append(group)
    return groups


def _fleet(model: list[Group], rng: np.random.Generator) -> Fleet:
    layers = tuple(dict.fromkeys(layer for group in model for layer in group.layers))
    stages: tuple[int, ...] = ()
    if rng.random() < 0.35:
        cuts = sorted(rng.choice(np.arange(1, len(layers)), min(2, len(layers) - 1), replace=False).tolist())
        stages = tuple(np.diff([0, *cuts, len(layers)]).tolist())
    tokens = int(rng.integers(1, 150))
    groups = tuple(_laid_out(group, tokens, rng) for group in model)
    fleet = Fleet(groups=groups, tp=int(rng.choice(DEGREES)), stages=stages)
    if len(model) > 1 and all(group.kind == "kv" for group in model) and rng.random() < SHARED_CHANCE:
        return _over_one_pool(replace(fleet, stages=()), rng)
    rng.shuffle(order := np.arange(len(groups)))
    return replace(fleet, groups=tuple(groups[i] for i in order))


def _laid_out(group: Group, tokens: int, rng: np.random.Generator) -> Group:
    names = {"slot"} if group.slots else {"block", "token"}
    # The dimensions of scales may be left out where there is one.
    names |= {"dim"} if group.dim > 1 or "scale" not in group.kind else set()
    names |= {"head"} if group.heads else set()
    paired = group.kind in PAIRED
    fused = bool(paired and rng.random() < 0.5)
    names |= ({"kv"} if fused else set()) | ({"layer"} if rng.random() < 0.3 else set())
    axes = tuple(str(axis) for axis in rng.permutation(sorted(names)))
    block_tokens = int(rng.choice(BLOCK_SIZES) if rng.random() < 0.7 else rng.integers(1, 129))
    padding = (axes[rng.integers(len(axes))], *((1, 0), (1, 0), (1, 1), (2, 0))[rng.integers(4)])
    return replace(
        group,
        block_tokens=block_tokens,
        num_blocks=3 if group.slots else -(-tokens // block_tokens) + int(rng.integers(0, 3)),
        axes=axes,
        packed=bool(paired and not fused and "dim" in axes and rng.random() < 0.3),
        padding=padding,
    )


def _over_one_pool(fleet: Fleet, rng: np.random.Generator) -> Fleet:
    """All groups in the same bytes: equal tensors, with the blocks outermost, or K and V and then the blocks."""
    first = fleet.groups[0]
    inner = [str(axis) for axis in rng.permutation(["token", "head", "dim"])]
    axes = (("kv", "block"), ("block", "kv"))[rng.integers(2)]
    num_blocks = first.num_blocks * len(fleet.groups)
    groups = tuple(
        replace(
            group, axes=(*axes, *inner), packed=False, block_tokens=first.block_tokens, num_blocks=num_blocks,
            padding=("dim", 1, 0),
        )
        for group in fleet.groups
    )  # fmt: skip
    return replace(fleet, groups=groups, shared=True)


def _with_fewer_layers(fleet: Fleet, rng: np.random.Generator) -> Fleet:
    groups = tuple(replace(group, layers=group.layers[: rng.integers(1, 5)]) for group in fleet.groups)
    return replace(fleet, groups=groups, stages=())


def _converted(source: Fleet, target: Fleet, rng: np.random.Generator) -> tuple[Fleet, Fleet]:
    """Give some groups dtypes that the target converts, of all groups where those lie in the same bytes."""
    of_all = source.shared or target.shared
    pairs = {}
    for group in source.groups:
        same = of_all and pairs
        pairs[group.name] = next(iter(pairs.values())) if same else PAIRS[rng.integers(len(PAIRS))]
        if not of_all and rng.random() < 0.3:
            pairs[group.name] = (pairs[group.name][1],) * 2

    def with_dtypes(fleet: Fleet, side: int) -> Fleet:
        dtypes = {name: pair[side] for name, pair in pairs.items()}
        of = {name: {"dtype": BITS[dtype].name, "tag": dtype} for name, dtype in dtypes.items()}
        return replace(fleet, groups=tuple(replace(group, **of[group.name]) for group in fleet.groups))

    asked = tuple({"->".join(pair) for pair in pairs.values() if pair[0] != pair[1]})
    return with_dtypes(source, 0), replace(with_dtypes(target, 1), convert=asked)


def _unlike(source: Fleet, target: Fleet, rng: np.random.Generator) -> tuple[Fleet, Fleet]:
    """Change one thing of the source that may, or may not, matter to the target."""
    group = source.groups[rng.integers(len(source.groups))]
    other = replace(source, model="another"), replace(target, model="the one")
    ranks = len(list(source.places()))
    changes: list[dict[str, Any]] = [
        {"dim": group.dim + 1} if "dim" in group.axes else {"tag": "unheard of"},
        {"dtype": "int32" if group.dtype == "uint32" else "int16"},
        {"tag": "unheard of"},
        {"window": 7} if not group.slots else {"tag": "unheard of"},
        {"layers": group.layers[1:] or ("layers.none",)},
        {"heads": group.heads * 2} if group.heads else {"tag": "unheard of"},
        {"name": f"{group.name}-renamed"},
    ]
    kind = int(rng.integers(len(changes) + 4))
    if source.shared or kind == len(changes):
        return other
    if kind > len(changes) + 2:
        return (replace(source, absent=(int(rng.integers(ranks)),)), target) if ranks > 1 else other
    if kind == len(changes) + 1:
        wider = {"tag": "opaque", "dtype": "uint16" if group.dtype == "uint32" else "uint32"}
        return _changed(source, group, wider), _changed(target, group, {"tag": "opaque"})
    change = _of_another_kind(group) if kind == len(changes) + 2 else changes[kind]
    return replace(_changed(source, group, change), stages=()), target


def _changed(fleet: Fleet, group: Group, change: dict[str, Any]) -> Fleet:
    if fleet.shared:
        change = {}
    groups = tuple(replace(one, **change) if one.name == group.name else one for one in fleet.groups)
    return replace(fleet, groups=groups)


def _of_another_kind(group: Group) -> dict[str, Any]:
    if group.slots:
        return {"kind": "latent", "heads": 0, "axes": ("block", "token", "dim"), "block_tokens": 16, "num_blocks": 9}
    if group.kind in ("latent", "scale"):
        return {"kind": "kv", "heads": 2, "axes": ("kv", "block", "token", "head", "dim")}
    return {"kind": "state", "axes": ("slot", "dim"), "heads": 0, "window": None, "num_blocks": 3, "packed": False}
