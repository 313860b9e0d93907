"""Ranks of unlike engines that have one model: pairs of layouts by name, and the memory of one rank."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import kvlink
from kvlink.bench.scattered import Bytes, Table, Words, pattern
from kvlink.errors import InvalidArgument

__all__ = ["LAYERS", "PAIRS", "Pair", "Rank", "RankPool", "Request", "private_bytes"]

LAYERS = 4
HEADS = 8
HEAD_DIM = 128
#: bfloat16, moved as what NumPy has of that size.
_ELEMENT_BYTES = 2
_HEAD_WORDS = HEAD_DIM * _ELEMENT_BYTES // 8
#: Pools are larger than what is moved, so that most blocks of a pool have neighbours that stay behind.
_POOL_SHARE = 2
_UNTOUCHED = 0xEE
_CHUNK_TOKENS = 512  # Of one component of one layer: at most 1 MiB, so that comparing stays in the cache.

NHD = "kv block token head dim"
HND = "kv block head token dim"


@dataclass(frozen=True, kw_only=True)
class Rank:
    """How one rank lays out its part of the cache: some of the heads of every layer."""

    heads: tuple[int, int] = (0, HEADS)
    block_tokens: int = 16
    axes: str = NHD

    @property
    def head_count(self) -> int:
        """KV heads of this rank."""
        return self.heads[1] - self.heads[0]

    @property
    def token_bytes(self) -> int:
        """What one token has on this rank, K and V of all layers."""
        return LAYERS * 2 * self.head_count * HEAD_DIM * _ELEMENT_BYTES


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One rank of the target, and the source ranks that it draws from."""

    sources: tuple[Rank, ...]
    target: Rank


def _share(degree: int, number: int) -> Rank:
    """Return rank `number` of `degree` tensor-parallel ones."""
    count = HEADS // degree
    return Rank(heads=(number * count, (number + 1) * count))


PAIRS = {
    "same": Pair(sources=(Rank(),), target=Rank()),
    "tp2-tp4": Pair(sources=(_share(2, 0),), target=_share(4, 0)),
    "tp4-tp2": Pair(sources=(_share(4, 0), _share(4, 1)), target=_share(2, 0)),
    "block16-block64": Pair(sources=(Rank(),), target=Rank(block_tokens=64)),
    "block64-block16": Pair(sources=(Rank(block_tokens=64),), target=Rank()),
    "hnd-nhd": Pair(sources=(Rank(axes=HND),), target=Rank()),
    "same-64KiB": Pair(sources=(Rank(block_tokens=32),), target=Rank(block_tokens=32)),
}
"""What `kvlink bench layout` measures. ``same`` and ``same-64KiB`` are the controls: nothing about them is unlike."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """How much one request of a pair moves."""

    pair: Pair
    num_tokens: int

    @classmethod
    def of(cls, pair: Pair, *, total_bytes: int) -> Request:
        """Return the longest request of whole blocks on both sides that moves at most `total_bytes`.

        Raises
        ------
        InvalidArgument
            If not even one block fits.
        """
        whole = math.lcm(pair.target.block_tokens, *(source.block_tokens for source in pair.sources))
        num_tokens = total_bytes // pair.target.token_bytes // whole * whole
        if num_tokens == 0:
            needed = whole * pair.target.token_bytes
            raise InvalidArgument(f"total bytes {total_bytes} is less than the {needed} of one block")
        return cls(pair=pair, num_tokens=num_tokens)

    @property
    def moved_bytes(self) -> int:
        """Bytes that the request moves."""
        return self.num_tokens * self.pair.target.token_bytes

    def pool_blocks(self, rank: Rank) -> int:
        """Return the blocks in the pool of `rank`."""
        return self.num_tokens // rank.block_tokens * _POOL_SHARE

    def table(self, rank: Rank, *, seed: int) -> Table:
        """Return distinct random blocks of the pool of `rank`, in random order."""
        chosen = np.random.default_rng(seed).permutation(self.pool_blocks(rank))
        return chosen[: self.num_tokens // rank.block_tokens].astype(np.int32)


def private_bytes(size: int) -> Bytes:
    """Return `size` bytes of ordinary memory, every page of which is there."""
    found: Bytes = np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=np.uint8)
    found[:] = _UNTOUCHED
    return found


class RankPool:
    """The memory of one rank, from one call of `kvlink.empty`, and what is in it."""

    def __init__(self, rank: Rank, request: Request) -> None:
        """Allocate it, and touch every page before anything is timed."""
        self._rank = rank
        self._blocks = request.pool_blocks(rank)
        self._owner: Any = kvlink.empty((self._blocks * rank.block_tokens * rank.token_bytes,), "uint8")
        self.bytes: Bytes = np.frombuffer(memoryview(self._owner), dtype=np.uint8)
        self.forget()

    @property
    def nbytes(self) -> int:
        """Size of the memory."""
        return int(self.bytes.size)

    def cache(self) -> kvlink.KVCache:
        """Describe it: one tensor a layer."""
        rank = self._rank
        layers = self.bytes.view(np.uint16).reshape(LAYERS, *self._shape(HEAD_DIM))
        tensors = {f"layers.{number}": layers[number] for number in range(LAYERS)}
        return kvlink.KVCache.from_tensors(
            tensors,
            axes=rank.axes,
            block_tokens=rank.block_tokens,
            heads=range(*rank.heads),
            total_kv_heads=HEADS,
            dtype="bfloat16",
        )

    def fill(self, *, seed: int) -> None:
        """Write a pattern everywhere whose every 8 bytes are those of no other block, token or head.

        Ranks of one engine agree: the pattern follows from the block's number and the head's in the model.
        """
        step = max(1, _CHUNK_TOKENS // self._rank.block_tokens)
        for part, component in self._components():
            for first in range(0, self._blocks, step):
                blocks = np.arange(first, min(first + step, self._blocks))
                component[blocks] = _expected(self._rank, part * self._blocks + blocks, self._rank.heads, seed)

    def forget(self) -> None:
        """Overwrite everything, so that what an earlier repetition left cannot pass for new."""
        self.bytes[:] = _UNTOUCHED

    def holds(self, *, request: Request, source_table: Table, target_table: Table, seed: int) -> bool:
        """Return whether the tokens of `target_table` are those of the source, and all other blocks are untouched."""
        source, target = request.pair.sources[0], self._rank
        whole = math.lcm(source.block_tokens, target.block_tokens)
        step = max(1, _CHUNK_TOKENS // whole) * whole
        untouched = np.setdiff1d(np.arange(self._blocks), target_table)
        nothing = np.uint64(int.from_bytes(bytes([_UNTOUCHED] * 8), "little"))
        source_blocks = request.pool_blocks(source)
        for part, component in self._components():
            for first in range(0, request.num_tokens, step):
                end = min(first + step, request.num_tokens)
                got = component[target_table[first // target.block_tokens : end // target.block_tokens]]
                blocks = source_table[first // source.block_tokens : end // source.block_tokens].astype(np.int64)
                expected = _expected(source, part * source_blocks + blocks, target.heads, seed)
                if not np.array_equal(got.reshape(-1), expected.reshape(-1)):
                    return False
            for first in range(0, untouched.size, 64):
                if not np.all(component[untouched[first : first + 64]] == nothing):
                    return False
        return True

    def _components(self) -> Iterator[tuple[int, Words]]:
        """Yield each K and V with its number, as words by block, token, head and place in the head."""
        names = self._rank.axes.split()
        order = [names.index(axis) for axis in ("kv", "block", "token", "head", "dim")]
        layers = self.bytes.view(np.uint64).reshape(LAYERS, *self._shape(_HEAD_WORDS))
        for number, layer in enumerate(layers):
            for kv, component in enumerate(layer.transpose(order)):
                yield number * 2 + kv, component

    def _shape(self, dim: int) -> tuple[int, ...]:
        rank = self._rank
        sizes = {"kv": 2, "block": self._blocks, "token": rank.block_tokens, "head": rank.head_count, "dim": dim}
        return tuple(sizes[axis] for axis in rank.axes.split())


def _expected(source: Rank, blocks: Any, heads: tuple[int, int], seed: int) -> Words:
    """Return what the pattern puts into some heads of numbered blocks of `source`, by block, token, head and word."""
    block_words = source.block_tokens * HEADS * _HEAD_WORDS
    token = np.arange(source.block_tokens, dtype=np.uint64) * np.uint64(HEADS * _HEAD_WORDS)
    of_heads = np.arange(heads[0] * _HEAD_WORDS, heads[1] * _HEAD_WORDS, dtype=np.uint64)
    index = blocks.astype(np.uint64)[:, None, None] * np.uint64(block_words) + token[:, None] + of_heads
    return pattern(index, seed).reshape(len(blocks), source.block_tokens, heads[1] - heads[0], _HEAD_WORDS)
