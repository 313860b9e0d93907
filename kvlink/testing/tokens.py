"""Tagged KV elements: a copy that lands in the wrong layer, block, token, head or dim is told from a right one.

Needs NumPy.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["check_tokens", "fill_tokens"]


def fill_tokens(
    tensors: Mapping[str, Any], *, axes: str, blocks: Sequence[int], num_tokens: int, seed: int = 0
) -> None:
    """Write a tag of its coordinate into every element of tokens ``[0, num_tokens)``.

    Takes the same `tensors` and `axes` as ``KVCache.from_tensors``; values must be writable
    through NumPy (view bfloat16 or fp8 torch tensors as integers of the same size first).
    Tokens in holes (``-1``) are left alone.
    """
    for layer, component, array in _components(tensors, axes):
        for token, block, offset in _tokens(array, blocks, range(num_tokens)):
            array[block, offset] = _tags(array, layer=layer, component=component, token=token, seed=seed)


def check_tokens(
    tensors: Mapping[str, Any],
    *,
    axes: str,
    blocks: Sequence[int],
    num_tokens: int,
    skip_tokens: int = 0,
    seed: int = 0,
) -> None:
    """Compare tokens ``[skip_tokens, num_tokens)`` with what `fill_tokens` wrote for the same seed.

    `blocks` is the table of the side that is checked; holes (``-1``) are not compared.

    Raises
    ------
    AssertionError
        Names the layer, component, token, head and dim of the first wrong element, and how
        many elements of that token are wrong.
    """
    for layer, component, array in _components(tensors, axes):
        for token, block, offset in _tokens(array, blocks, range(skip_tokens, num_tokens)):
            found = _as_bits(array[block, offset])
            expected = _as_bits(_tags(array, layer=layer, component=component, token=token, seed=seed))
            wrong = np.argwhere(found != expected)
            if len(wrong):
                head, dim = (int(index) for index in wrong[0])
                raise AssertionError(
                    f"layer {layer!r} component {component} token {token} (block {block}, offset {offset}) "
                    f"head {head} dim {dim}: found {found[head, dim]:#x}, expected {expected[head, dim]:#x}; "
                    f"{len(wrong)} of {found.size} elements of this token are wrong"
                )


def _components(tensors: Mapping[str, Any], axes: str) -> list[tuple[str, str, npt.NDArray[Any]]]:
    """Return views of every K and V, with dimensions ordered ``block token head dim``."""
    names = axes.split()
    found = []
    for layer, value in tensors.items():
        apart = value if isinstance(value, Mapping) else None
        if apart is None:
            fused = np.moveaxis(np.asarray(value), names.index("kv"), 0)
            apart = {"k": fused[0], "v": fused[1]}
        inner = [name for name in names if name != "kv"]
        order = [inner.index(name) for name in ("block", "token", "head", "dim")]
        found += [(layer, component, np.asarray(array).transpose(order)) for component, array in apart.items()]
    return found


def _tokens(array: npt.NDArray[Any], blocks: Sequence[int], tokens: range) -> list[tuple[int, int, int]]:
    block_tokens = array.shape[1]
    placed = [(token, int(blocks[token // block_tokens]), token % block_tokens) for token in tokens]
    return [entry for entry in placed if entry[1] >= 0]


def _tags(array: npt.NDArray[Any], *, layer: str, component: str, token: int, seed: int) -> npt.NDArray[Any]:
    """One tag per (head, dim), as elements of the array's own type."""
    _, _, heads, dims = array.shape
    start = zlib.crc32(f"{seed}/{layer}/{component}/{token}".encode())
    index = np.arange(heads * dims, dtype=np.uint64).reshape(heads, dims)
    mixed = (index + np.uint64(start)) * np.uint64(0x9E3779B97F4A7C15)  # wraps: a multiplicative hash
    mixed ^= mixed >> np.uint64(29)
    bits: npt.NDArray[Any] = mixed.astype(np.dtype(f"u{array.dtype.itemsize}"))
    return bits.view(array.dtype)


def _as_bits(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Compare bit patterns: a tag may be a NaN, which is unequal to itself."""
    return np.ascontiguousarray(array).view(np.dtype(f"u{array.dtype.itemsize}"))
