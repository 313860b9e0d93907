"""Fleets of ranks over NumPy memory: tensor-parallel ranks, pipeline stages, replicas and groups, laid out in any way.

The layout table spells them and the property test draws them. No bytes cross a process here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from kvlink.layout import KVCache
from kvlink.plan import Conversions, check_conversions

PAIRED = {"kv": ("k", "v"), "kv_scale": ("k_scale", "v_scale")}
SINGLE = {"latent": "latent", "state": "state", "scale": "scale"}
#: Memory starts full of this, from a place that is drawn, so that a byte that ought not to move shows.
NOISE = np.random.default_rng(0).integers(0, 256, 4 << 20, np.uint8)
Key = tuple[str, str, str]  # group, layer, component


@dataclass(frozen=True, kw_only=True)
class Group:
    """One group of a model, and how one side lays it out.

    `heads` are the model's KV heads; 0: there is no head axis. `axes` names the dimensions from the slowest to the
    fastest; with ``layer``, one tensor holds all layers of a rank. Without ``kv``, K and V are tensors of their own,
    or slices of one if `packed`. `padding` is an axis, and how many times as long it is in memory, and how much more.
    """

    name: str = "full"
    kind: str = "kv"
    layers: tuple[str, ...] = ("l0", "l1", "l2", "l3")
    heads: int = 8
    dim: int = 4
    dtype: str = "uint16"
    tag: str | None = None
    window: int | None = None
    block_tokens: int = 16
    num_blocks: int = 6
    axes: tuple[str, ...] = ("kv", "block", "token", "head", "dim")
    packed: bool = False
    padding: tuple[str, int, int] = ("dim", 1, 0)

    @property
    def slots(self) -> bool:
        return self.kind == "state"

    @property
    def dtype_tag(self) -> str:
        return self.tag or self.dtype

    @property
    def components(self) -> tuple[str, ...]:
        return PAIRED[self.kind] if self.kind in PAIRED else (SINGLE[self.kind],)

    def heads_of(self, rank: int, *, tp: int) -> range:
        """The heads that one of `tp` ranks holds: a share of them, or one of which there are replicas."""
        if not self.heads:
            return range(1)
        if tp <= self.heads:
            share = self.heads // tp
            return range(rank * share, (rank + 1) * share)
        return range(rank * self.heads // tp, rank * self.heads // tp + 1)


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """All ranks of one side. `stages` are the sizes of its pipeline stages, in layers of the model.

    `absent` ranks do not take part. With `shared`, the groups of a rank lie in the same memory and share a block pool.
    `convert` is what a target asks for.
    """

    groups: tuple[Group, ...]
    tp: int = 1
    stages: tuple[int, ...] = ()
    model: str | None = None
    shared: bool = False
    absent: tuple[int, ...] = ()
    convert: tuple[str, ...] = ()

    def places(self) -> Iterator[tuple[tuple[str, ...], int]]:
        """The layers and the tensor-parallel index of each rank that takes part, in the order of the ranks."""
        layers = tuple(dict.fromkeys(layer for group in self.groups for layer in group.layers))
        first, rank = 0, 0
        for size in self.stages or (len(layers),):
            for index in range(self.tp):
                if rank not in self.absent:
                    yield layers[first : first + size], index
                rank += 1
            first += size


@dataclass
class Rank:
    """One cache, with a view of each component whose dimensions are (block, token, head, dim)."""

    cache: KVCache
    groups: dict[str, Group]
    heads: dict[str, range]
    views: dict[Key, np.ndarray]
    backings: list[np.ndarray] = field(repr=False)
    converts: Conversions = frozenset()

    @property
    def coordinates(self) -> set[tuple[str, str, str, int]]:
        """Every (group, layer, component, head) that this rank holds."""
        return {(*key, head) for key in self.views for head in self.heads[key[0]]}


def build(fleet: Fleet, rng: np.random.Generator) -> list[Rank]:
    """Allocate the memory of all ranks, full of random bytes. A rank without any layer is left out."""
    return [_rank(fleet, layers, index, rng) for layers, index in _inhabited(fleet)]


def build_one(fleet: Fleet, rng: np.random.Generator) -> Rank:
    """The same for one rank, which is drawn: the others of a target's fleet take no part in a handoff to it."""
    places = _inhabited(fleet)
    layers, index = places[rng.integers(len(places))]
    return _rank(fleet, layers, index, rng)


def _inhabited(fleet: Fleet) -> list[tuple[tuple[str, ...], int]]:
    of_groups = {layer for group in fleet.groups for layer in group.layers}
    return [(layers, index) for layers, index in fleet.places() if not of_groups.isdisjoint(layers)]


def _rank(fleet: Fleet, layers: tuple[str, ...], index: int, rng: np.random.Generator) -> Rank:
    caches: list[KVCache] = []
    groups: dict[str, Group] = {}
    heads: dict[str, range] = {}
    views: dict[Key, np.ndarray] = {}
    backings: list[np.ndarray] = []
    memory: list[np.ndarray] = []
    for group in fleet.groups:
        own = [layer for layer in group.layers if layer in layers]
        if not own:
            continue
        rng.shuffle(own)
        groups[group.name] = group
        heads[group.name] = group.heads_of(index, tp=fleet.tp)
        lent = iter(memory if fleet.shared else ())
        tensors = {}
        for name in ["all"] if "layer" in group.axes else own:
            made = {piece: _tensor(group, len(own), heads[group.name], rng, lent) for piece in _pieces(group)}
            memory += [view for view, _ in made.values()]
            backings += [backing for _, backing in made.values()]
            tensors[name] = _add_views(views, group, own if name == "all" else [name], made)
        caches.append(
            KVCache.from_tensors(
                tensors,
                axes=" ".join(group.axes),
                block_tokens=None if group.slots else group.block_tokens,
                heads=heads[group.name] if group.heads else None,
                total_kv_heads=group.heads or None,
                group=group.name,
                window=group.window,
                component="scale" if "scale" in group.kind else None,
                layers=own if "layer" in group.axes else None,
                dtype=group.tag,
                model=fleet.model,
            )
        )
    cache = caches[0] if len(caches) == 1 else KVCache.join(*caches, shared=fleet.shared)
    return Rank(cache, groups, heads, views, backings, check_conversions(fleet.convert))


def _pieces(group: Group) -> tuple[str, ...]:
    """The tensors of a layer: one, or K and V apart."""
    return ("k", "v") if group.kind in PAIRED and "kv" not in group.axes and not group.packed else ("one",)


def _tensor(
    group: Group, layers: int, heads: range, rng: np.random.Generator, lent: Iterator[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the used part of a tensor and all of its memory, which may be another group's."""
    sizes = {
        "layer": layers, "kv": 2, "block": group.num_blocks, "slot": group.num_blocks, "token": group.block_tokens,
        "head": len(heads), "dim": group.dim * (2 if group.packed else 1),
    }  # fmt: skip
    shape = [sizes[axis] for axis in group.axes]
    other = next(lent, None)
    if other is not None:
        assert other.shape == tuple(shape), "groups that share memory have equal tensors here"
        return other, other
    index = [slice(None)] * len(shape)
    axis, times, more = group.padding
    if axis in group.axes:
        position = group.axes.index(axis)
        index[position] = slice(more, more + shape[position] * times, times)
        shape[position] = shape[position] * times + more
    size = math.prod(shape) * np.dtype(group.dtype).itemsize
    start = rng.integers(NOISE.size - size)
    backing = NOISE[start : start + size].copy().view(group.dtype).reshape(shape)
    return backing[tuple(index)], backing


def _add_views(
    views: dict[Key, np.ndarray], group: Group, layers: list[str], made: dict[str, tuple[np.ndarray, np.ndarray]]
) -> np.ndarray | dict[str, np.ndarray]:
    """Note the view of each component of `layers`; return what `from_tensors` takes."""
    tensors = {piece: view for piece, (view, _) in made.items()}
    if group.packed:
        whole = tensors.pop("one")
        position = group.axes.index("dim")
        for piece, half in (("k", slice(0, group.dim)), ("v", slice(group.dim, None))):
            tensors[piece] = whole[tuple(half if i == position else slice(None) for i in range(whole.ndim))]
    for i, layer in enumerate(layers):
        for j, component in enumerate(group.components):
            tensor = tensors["one"] if "one" in tensors else tensors["kv"[j]]
            views[group.name, layer, component] = _canonical(tensor, group.axes, {"layer": i, "kv": j})
    return tensors.get("one", tensors)


def _canonical(tensor: np.ndarray, axes: tuple[str, ...], picked: dict[str, int]) -> np.ndarray:
    """Return one component of one layer with dimensions (block, token, head, dim)."""
    tensor = tensor[tuple(picked.get(axis, slice(None)) for axis in axes)]
    left = [axis for axis in axes if axis not in picked]
    wanted = ("slot" if "slot" in left else "block", "token", "head", "dim")
    tensor = tensor.transpose([left.index(axis) for axis in wanted if axis in left])
    return tensor[tuple(slice(None) if axis in left else None for axis in wanted)]
