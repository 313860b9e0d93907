"""The blocks of `kvlink bench transfer`, for processes without kvlink: the same places, and the same pattern.

`tests/unit/test_bench_peers.py` compares both. Needs only NumPy.
"""

import mmap

import numpy as np

UNTOUCHED = 0xEE
CHUNK_WORDS = 1 << 18


def pattern(index, seed):
    """Return the 8 bytes that stand at each place of the source. The product wraps, as it should."""
    return (index + (np.uint64(seed) << np.uint64(40))) * np.uint64(0x9E3779B97F4A7C15)


class Blocks:
    """A pool of private memory: `pool_blocks` blocks of K, then as many of V."""

    def __init__(self, *, block_bytes, pool_blocks, entries, seed):
        self.block_bytes = block_bytes
        self.pool_blocks = pool_blocks
        self.entries = entries
        self.seed = seed
        size = 2 * pool_blocks * block_bytes
        self.memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes = np.frombuffer(self.memory, dtype=np.uint8)
        self.bytes.flags.writeable = True
        self.address = self.bytes.ctypes.data

    @property
    def runs(self):
        """How many runs one request moves."""
        return 2 * self.entries

    def fill(self):
        words = self.bytes.view(np.uint64)
        for first in range(0, words.size, CHUNK_WORDS):
            piece = words[first : first + CHUNK_WORDS]
            piece[:] = pattern(np.arange(first, first + piece.size, dtype=np.uint64), self.seed)

    def forget(self):
        self.bytes[:] = UNTOUCHED

    def offsets(self, table):
        """Return where each run of `table` lies: every K, then every V."""
        within = table.astype(np.uint64) * np.uint64(self.block_bytes)
        return np.concatenate([within, within + np.uint64(self.bytes.size // 2)])

    def holds(self, source_table, target_table):
        """Return whether the target's blocks hold what the source's do, and all others nothing."""
        source, target = self.offsets(source_table), self.offsets(target_table)
        rows = self.bytes.view(np.uint64).reshape(2 * self.pool_blocks, -1)
        words = rows.shape[1]
        step = max(1, CHUNK_WORDS // words)
        within = np.arange(words, dtype=np.uint64)
        for first in range(0, len(target), step):
            here = slice(first, first + step)
            expected = pattern(source[here, None] // np.uint64(8) + within, self.seed)
            if not np.array_equal(rows[target[here] // np.uint64(self.block_bytes)], expected):
                return False
        left = np.ones(len(rows), dtype=bool)
        left[target // np.uint64(self.block_bytes)] = False
        nothing = np.uint64(int.from_bytes(bytes([UNTOUCHED] * 8), "little"))
        left = np.flatnonzero(left)
        return all(bool(np.all(rows[left[first : first + step]] == nothing)) for first in range(0, len(left), step))
