"""Memory of a member of the soak: every word tells its place in the model and which filling of which token it is of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import kvlink

LAYERS = ("layers.0", "layers.1")
COMPONENTS = ("k", "v")
HEADS, DIM = 8, 128
_ODD = np.uint32(2654435761)
#: By layer, component, head and dimension; the same in every process.
_RAMP = (np.arange(len(LAYERS) * 2 * HEADS * DIM, dtype=np.uint32) * _ODD).reshape(len(LAYERS), 2, HEADS, DIM)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How one member lays the model out, and the memory that it does so in."""

    axes: str = "kv block token head dim"
    block_tokens: int = 4
    tokens: int = 64
    heads: tuple[int, int] = (0, HEADS)
    memory: str = "pool"

    @property
    def blocks(self) -> int:
        """How many there are."""
        return self.tokens // self.block_tokens

    def serves(self, target: Shape) -> bool:
        """Whether a target finds all of its heads here."""
        return self.heads[0] <= target.heads[0] and target.heads[1] <= self.heads[1]


class TokenMemory:
    """The blocks of one cache. A tag names one filling of one token, and no other filling anywhere has it.

    ``tags`` says what stands where by right, so that `find_wrong` finds whatever anybody else has written.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._heads = slice(*shape.heads)
        lengths = {
            "layer": len(LAYERS), "kv": 2, "block": shape.blocks, "token": shape.block_tokens,
            "head": shape.heads[1] - shape.heads[0], "dim": DIM,
        }  # fmt: skip
        axes = shape.axes.split()
        apart = ["one"] if "kv" in axes else list(COMPONENTS)
        names = ["all"] if "layer" in axes else list(LAYERS)
        self._owners = []
        tensors: dict[str, dict[str, np.ndarray]] = {}
        for name in names:
            tensors[name] = {part: self._new([lengths[axis] for axis in axes]) for part in apart}
        self._views = [
            (
                (layer, component),
                _canonical(
                    _part(tensors[names[layer % len(names)]], component), axes, {"layer": layer, "kv": component}
                ),
            )
            for layer in range(len(LAYERS))
            for component in range(2)
        ]
        self.tags = np.zeros((shape.blocks, shape.block_tokens), np.uint32)
        self.fill(range(shape.blocks), np.zeros(shape.tokens, np.uint32))
        self.cache = kvlink.KVCache.from_tensors(
            {name: parts.get("one", parts) for name, parts in tensors.items()},
            axes=shape.axes,
            block_tokens=shape.block_tokens,
            heads=range(*shape.heads),
            total_kv_heads=HEADS,
            layers=list(LAYERS) if "layer" in axes else None,
        )

    @property
    def words_a_block(self) -> int:
        """How many words each block has."""
        return sum(view[0].size for _, view in self._views)

    def _new(self, shape: list[int]) -> np.ndarray:
        if self.shape.memory != "pool":
            return np.empty(shape, np.uint32)
        self._owners.append(kvlink.empty(tuple(shape), "uint32"))
        return np.frombuffer(self._owners[-1], dtype=np.uint32).reshape(shape)

    def fill(self, blocks: Sequence[int], tags: np.ndarray) -> None:
        """Overwrite whole blocks with these tags, one a token."""
        chosen = np.asarray(blocks, np.intp)
        self.tags[chosen] = tags.reshape(len(chosen), self.shape.block_tokens)
        for place, view in self._views:
            view[chosen] = self._expected(place, self.tags[chosen])

    def wrong_words(self, blocks: Sequence[int]) -> int:
        """How many words of these blocks are not what their tags say."""
        chosen = np.asarray(blocks, np.intp)
        return sum(
            int(np.count_nonzero(view[chosen] != self._expected(place, self.tags[chosen])))
            for place, view in self._views
        )

    def wrong_in(self, blocks: Sequence[int], slots: np.ndarray) -> int:
        """The same for some token slots of the blocks only, counted over all of them in their order."""
        wrong = 0
        chosen = np.asarray(blocks, np.intp)
        for place, view in self._views:
            differs = view[chosen] != self._expected(place, self.tags[chosen])
            wrong += int(np.count_nonzero(differs.reshape(len(slots), *differs.shape[2:])[slots]))
        return wrong

    def tell_wrong(self, blocks: Sequence[int]) -> str:
        """What stands in the first wrong word, for people."""
        for block in blocks:
            for (layer, component), view in self._views:
                expected = self._expected((layer, component), self.tags[block : block + 1])[0]
                wrong = np.argwhere(view[block] != expected)
                if len(wrong):
                    token, head, dim = (int(index) for index in wrong[0])
                    found = int(view[block, token, head, dim] - _RAMP[layer, component, self._heads][head, dim])
                    return (
                        f"{len(wrong)} words of {LAYERS[layer]} {COMPONENTS[component]} of block {block}, the first at "
                        f"token {token} head {head} dim {dim}: tag {found:#x} in place of {self.tags[block, token]:#x}"
                    )
        return "nothing any more"

    def turn_a_bit(self, rng: np.random.Generator, block: int) -> None:
        """Write into a block what nobody may: the negative control."""
        _, view = self._views[int(rng.integers(len(self._views)))]
        place = (block, *(int(rng.integers(length)) for length in view.shape[1:]))
        view[place] ^= np.uint32(1 << int(rng.integers(32)))

    def _expected(self, place: tuple[int, int], tags: np.ndarray) -> np.ndarray:
        return _RAMP[place][self._heads] + tags[..., None, None]


def _part(parts: dict[str, np.ndarray], component: int) -> np.ndarray:
    return parts.get("one", parts.get(COMPONENTS[component]))


def _canonical(tensor: np.ndarray, axes: list[str], picked: dict[str, int]) -> np.ndarray:
    """One component of one layer, with dimensions (block, token, head, dim)."""
    tensor = tensor[tuple(picked.get(axis, slice(None)) for axis in axes)]
    left = [axis for axis in axes if axis not in picked]
    return tensor.transpose([left.index(axis) for axis in ("block", "token", "head", "dim")])
