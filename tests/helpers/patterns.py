"""Random cache geometries in flat memory, and a reference handoff done one token at a time in NumPy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from helpers.conversions import converted

FUSED_AXES = ("kv", "block", "token", "head", "dim")
APART_AXES = ("block", "token", "head", "dim")
COMPONENTS = ("k", "v")
_LARGE_BYTES = 32 << 20


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """What both sides of a handoff agree on, but for the dtype of their elements, which `tag` may call otherwise."""

    layers: tuple[str, ...] = ("layers.0", "layers.1")
    heads: int = 2
    head_dim: int = 8
    dtype: str = "float32"
    tag: str | None = None

    @property
    def dtype_tag(self) -> str:
        """What layouts call the dtype."""
        return self.tag or self.dtype


@dataclass(frozen=True, kw_only=True)
class Placement:
    """How one side cuts the cache into blocks and puts its tensors into one flat piece of memory.

    `axes` names the dimensions of each tensor from the slowest to the fastest. `interleaved`
    makes the layers slices of one tensor whose layer dimension stands at `layer_position`.
    `padding` makes each dimension that much longer in memory than in the tensor, and
    `gap_elements` lie before and behind every tensor: nothing may be written in either.
    """

    num_blocks: int = 8
    block_tokens: int = 4
    axes: tuple[str, ...] = FUSED_AXES
    layer_order: tuple[int, ...] | None = None
    interleaved: bool = False
    layer_position: int = 0
    padding: tuple[int, ...] = (0, 0, 0, 0, 0)
    gap_elements: int = 16
    memory: str = "pool"

    @property
    def fused(self) -> bool:
        """Whether K and V share a tensor."""
        return "kv" in self.axes

    @property
    def axes_text(self) -> str:
        """The axes as `KVCache.from_tensors` takes them."""
        return " ".join(self.axes)


def flat_bytes(geometry: Geometry, placement: Placement) -> int:
    """The size of the memory that the placement needs."""
    elements = sum(_padded_elements(shape, placement) for shape, _ in _tensors(geometry, placement))
    gaps = placement.gap_elements * (len(_tensors(geometry, placement)) + 1)
    return (elements + gaps) * np.dtype(geometry.dtype).itemsize


def carve(flat: np.ndarray, geometry: Geometry, placement: Placement) -> dict[str, Any]:
    """Views into `flat` (uint8), as `KVCache.from_tensors` takes them."""
    memory = flat.view(geometry.dtype)
    found: dict[str, Any] = {}
    position = placement.gap_elements
    for shape, names in _tensors(geometry, placement):
        elements = _padded_elements(shape, placement)
        padded = memory[position : position + elements].reshape(_padded_shape(shape, placement))
        position += elements + placement.gap_elements
        view = padded[tuple(slice(0, length) for length in shape)]
        if placement.interleaved:
            view = np.moveaxis(view, placement.layer_position, 0)
        for (layer, component), tensor in zip(names, view if placement.interleaved else [view], strict=True):
            if component is None:
                found[layer] = tensor
            else:
                found.setdefault(layer, {})[component] = tensor
    return found


def canonical(tensors: Mapping[str, Any], placement: Placement) -> dict[tuple[str, str], np.ndarray]:
    """The tensors by (layer, component), each as a view with dimensions block, token, head, dim."""
    found = {}
    for layer, value in tensors.items():
        for index, component in enumerate(COMPONENTS):
            array = np.moveaxis(value, placement.axes.index("kv"), 0)[index] if placement.fused else value[component]
            names = [axis for axis in placement.axes if axis != "kv"]
            found[layer, component] = array.transpose([names.index(axis) for axis in APART_AXES])
    return found


def fill_random(flat: np.ndarray, *, seed: int) -> None:
    """Fill memory with the same random bytes for the same seed and size, in any process.

    Large memory, of which only the time that it takes to move matters, gets a few in each page.
    """
    rng = np.random.default_rng(seed)
    if flat.size < _LARGE_BYTES:
        flat[:] = np.frombuffer(rng.bytes(flat.size), dtype=np.uint8)
        return
    pages = flat[: flat.size // 4096 * 4096].reshape(-1, 4096)
    pages[:, :8] = np.frombuffer(rng.bytes(8 * len(pages)), dtype=np.uint8).reshape(-1, 8)


@dataclass(frozen=True, kw_only=True)
class Request:
    """One handoff: two block tables and the range of tokens that the target wants."""

    source_blocks: tuple[int, ...]
    target_blocks: tuple[int, ...]
    num_tokens: int
    skip_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Side:
    """The memory of one side, as the reference sees it."""

    flat: np.ndarray
    geometry: Geometry
    placement: Placement

    @classmethod
    def random(cls, geometry: Geometry, placement: Placement, *, seed: int) -> Side:
        """A side whose memory, gaps and padding included, is full of the seed's bytes."""
        flat = np.empty(flat_bytes(geometry, placement), dtype=np.uint8)
        fill_random(flat, seed=seed)
        return cls(flat=flat, geometry=geometry, placement=placement)

    def components(self) -> dict[tuple[str, str], np.ndarray]:
        """Views by (layer, component): block, token, head, dim."""
        return canonical(carve(self.flat, self.geometry, self.placement), self.placement)


def hand_over(source: Side, target: Side, request: Request) -> None:
    """What a handoff has to do, one token at a time, by the layouts' own NumPy views."""
    read, written = source.components(), target.components()
    pair = source.geometry.dtype_tag, target.geometry.dtype_tag
    if pair[0] != pair[1]:
        read = {key: converted(view, pair).view(target.geometry.dtype) for key, view in read.items()}
    for token in range(request.skip_tokens, request.num_tokens):
        from_block, from_offset = _place(token, request.source_blocks, source.placement)
        to_block, to_offset = _place(token, request.target_blocks, target.placement)
        if to_block < 0:
            continue
        for key in written:
            written[key][to_block, to_offset] = read[key][from_block, from_offset]


def _place(token: int, blocks: Sequence[int], placement: Placement) -> tuple[int, int]:
    return blocks[token // placement.block_tokens], token % placement.block_tokens


def first_difference(found: np.ndarray, expected: np.ndarray) -> str:
    """Where two memories differ, for a failure message; empty when they are the same."""
    wrong = np.flatnonzero(found != expected)
    if not len(wrong):
        return ""
    first = int(wrong[0])
    return f"{len(wrong)} bytes differ; the first at {first}: found {found[first]:#x}, expected {expected[first]:#x}"


def blocks_for(num_tokens: int, block_tokens: int) -> int:
    """How many blocks a sequence takes."""
    return -(-num_tokens // block_tokens)


def scattered(rng: np.random.Generator, num_blocks: int, count: int) -> tuple[int, ...]:
    """`count` different blocks in random order."""
    return tuple(int(block) for block in rng.permutation(num_blocks)[:count])


def _tensors(geometry: Geometry, placement: Placement) -> list[tuple[tuple[int, ...], Sequence[tuple[str, Any]]]]:
    """The shape of each tensor in memory order, and the (layer, component) pairs in it."""
    lengths = {
        "kv": 2,
        "block": placement.num_blocks,
        "token": placement.block_tokens,
        "head": geometry.heads,
        "dim": geometry.head_dim,
    }
    order = placement.layer_order or tuple(range(len(geometry.layers)))
    layers = [geometry.layers[index] for index in order]
    shape = tuple(lengths[axis] for axis in placement.axes)
    parts: Sequence[Any] = [None] if placement.fused else COMPONENTS
    if placement.interleaved:
        shape = (*shape[: placement.layer_position], len(layers), *shape[placement.layer_position :])
        return [(shape, [(layer, part) for layer in layers]) for part in parts]
    return [(shape, [(layer, part)]) for layer in layers for part in parts]


def _padded_shape(shape: Sequence[int], placement: Placement) -> tuple[int, ...]:
    padding = (*placement.padding, *([0] * len(shape)))
    return tuple(length + extra for length, extra in zip(shape, padding, strict=False))


def _padded_elements(shape: Sequence[int], placement: Placement) -> int:
    return int(np.prod(_padded_shape(shape, placement)))
