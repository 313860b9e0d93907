"""Blocks scattered over a pool by a random permutation, filled with a pattern that no two places share."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

import kvlink
from kvlink.errors import InvalidArgument

__all__ = ["Bytes", "Geometry", "Pool", "Table", "Words", "expected_words", "pattern", "permutation", "run_offsets"]

Table = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]

BLOCK_TOKENS = 16
#: Pools are larger than what is moved, so that most blocks of a pool have neighbours that stay behind.
_POOL_SHARE = 2
_UNTOUCHED = 0xEE
_CHUNK_WORDS = 1 << 18  # 2 MiB: filling and comparing stay in the cache


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """One layer, K and V apart: each block of the table is two runs of `block_bytes` contiguous bytes."""

    block_bytes: int
    total_bytes: int

    def __post_init__(self) -> None:
        """Refuse what cannot be cut into whole blocks."""
        if self.block_bytes % 128:
            raise InvalidArgument(f"block bytes {self.block_bytes} is not a multiple of 128 (16 tokens of 8 bytes)")
        if self.total_bytes < 2 * self.block_bytes:
            raise InvalidArgument(f"total bytes {self.total_bytes} is less than K and V of one block")

    @property
    def entries(self) -> int:
        """Blocks in one request's table."""
        return self.total_bytes // (2 * self.block_bytes)

    @property
    def runs(self) -> int:
        """Contiguous runs that one request moves."""
        return 2 * self.entries

    @property
    def moved_bytes(self) -> int:
        """Bytes that one request moves: the total, rounded down to whole blocks."""
        return self.runs * self.block_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens of one request."""
        return self.entries * BLOCK_TOKENS

    @property
    def pool_blocks(self) -> int:
        """Blocks in each pool."""
        return self.entries * _POOL_SHARE

    @property
    def pool_bytes(self) -> int:
        """Size of each pool."""
        return self.pool_blocks * 2 * self.block_bytes


class Pool:
    """The memory of one side, as flat bytes and as a `kvlink.KVCache`."""

    def __init__(self, geometry: Geometry, *, memory: str) -> None:
        """Allocate with `kvlink.empty` (``"kvlink"``) or as any process would (``"foreign"``, ``"private"``)."""
        self._geometry = geometry
        self._owner: Any = (
            kvlink.empty((geometry.pool_bytes,), "uint8")
            if memory == "kvlink"
            else mmap.mmap(-1, geometry.pool_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        )
        self.bytes: Bytes = np.frombuffer(memoryview(self._owner), dtype=np.uint8)
        self.bytes[:] = _UNTOUCHED  # every page is there before anything is timed

    def cache(self) -> kvlink.KVCache:
        """Describe the pool as one layer of a paged KV cache."""
        shape = (2, self._geometry.pool_blocks, BLOCK_TOKENS, 1, self._geometry.block_bytes // BLOCK_TOKENS)
        tensors = {"layers.0": self.bytes.reshape(shape)}
        return kvlink.KVCache.from_tensors(tensors, axes="kv block token head dim", block_tokens=BLOCK_TOKENS)

    def fill(self, *, seed: int) -> None:
        """Write the pattern of `seed` everywhere: each 8 bytes are those of no other place."""
        words = self.bytes.view(np.uint64)
        for first in range(0, words.size, _CHUNK_WORDS):
            piece = words[first : first + _CHUNK_WORDS]
            piece[:] = pattern(np.arange(first, first + piece.size, dtype=np.uint64), seed)

    def forget(self) -> None:
        """Overwrite everything, so that what an earlier repetition left cannot pass for new."""
        self.bytes[:] = _UNTOUCHED

    def holds(self, *, source_table: Table, target_table: Table, seed: int) -> bool:
        """Return whether the target blocks hold their source blocks' pattern and all other blocks nothing."""
        geometry = self._geometry
        blocks = self.bytes.view(np.uint64).reshape(2, geometry.pool_blocks, -1)
        untouched = np.ones(geometry.pool_blocks, dtype=bool)
        untouched[target_table] = False
        step = max(1, _CHUNK_WORDS * 8 // geometry.block_bytes)
        nothing = np.uint64(int.from_bytes(bytes([_UNTOUCHED] * 8), "little"))
        for part in (0, 1):
            for first in range(0, geometry.entries, step):
                here = slice(first, first + step)
                expected = expected_words(geometry, part=part, blocks=source_table[here], seed=seed)
                if not np.array_equal(blocks[part, target_table[here]], expected):
                    return False
            left = np.flatnonzero(untouched)
            for first in range(0, left.size, step):
                if not np.all(blocks[part, left[first : first + step]] == nothing):
                    return False
        return True


def permutation(geometry: Geometry, *, seed: int) -> Table:
    """Return the table of one request: distinct random blocks of the pool, in random order."""
    chosen = np.random.default_rng(seed).permutation(geometry.pool_blocks)[: geometry.entries]
    return chosen.astype(np.int32)


def run_offsets(geometry: Geometry, table: Table) -> Words:
    """Return where each run of `table` lies in its pool: every K, then every V, in the table's order."""
    within = table.astype(np.uint64) * np.uint64(geometry.block_bytes)
    return np.concatenate([within, within + np.uint64(geometry.pool_bytes // 2)])


def expected_words(geometry: Geometry, *, part: int, blocks: Table, seed: int) -> Words:
    """Return what the pattern of `seed` puts into K (`part` 0) or V (1) of `blocks`, one row a block."""
    words = geometry.block_bytes // 8
    first = (blocks.astype(np.uint64) + np.uint64(part * geometry.pool_blocks)) * np.uint64(words)
    return pattern(first[:, None] + np.arange(words, dtype=np.uint64), seed)


def pattern(index: Words, seed: int) -> Words:
    """Mix a word's place with the seed. An odd factor keeps places apart; it wraps, as it should."""
    mixed: Words = (index + (np.uint64(seed) << np.uint64(40))) * np.uint64(0x9E3779B97F4A7C15)
    return mixed
