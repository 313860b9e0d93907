"""A node over blocks of numbers that tell which filling of which block they come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import kvlink

_ODD = np.uint32(2654435761)


class TaggedPool:
    """A node over the blocks of one layer; one token a block. A tag names one filling of one block.

    Whatever comes into a block by right is noted in ``tags``, so that `check` finds a byte that anybody else wrote.
    """

    def __init__(self, *, name: str, blocks: int, block_bytes: int, memory: str = "pool", **options: Any) -> None:
        shape = (blocks, 1, block_bytes // 4)
        if memory == "pool":
            self._owner = kvlink.empty(shape, "uint32")
            tensor = np.frombuffer(self._owner, dtype=np.uint32).reshape(shape)
        else:
            tensor = np.empty(shape, dtype=np.uint32)
        self.name = name
        self.blocks = tensor[:, 0]
        self.tags = [0] * blocks
        self._expected = np.empty_like(self.blocks)
        self._ramp = np.arange(shape[2], dtype=np.uint32) * _ODD
        self.fill(range(blocks), first_tag=1)
        cache = kvlink.KVCache.from_tensors({"layers.0": tensor}, axes="block token dim", block_tokens=1)
        self.node = kvlink.Node(cache, name=name, **options)

    def fill(self, blocks: Sequence[int], *, first_tag: int) -> None:
        """Overwrite blocks, the i-th with tag `first_tag` + i: what an engine does with blocks that are its own."""
        for tag, block in enumerate(blocks, first_tag):
            self.expect(block, tag)
            self.blocks[block] = self._expected[block]

    def expect(self, block: int, tag: int) -> None:
        """Note what has come into a block by right."""
        np.add(self._ramp, np.uint32(tag), out=self._expected[block])
        self.tags[block] = tag

    def holding(self, block: int, tag: int) -> int:
        """How many of the block's words are those of the tag."""
        return int(np.count_nonzero(self.blocks[block] - self._ramp == np.uint32(tag)))

    def touched(self, blocks: Sequence[int]) -> bool:
        """Whether something new stands at the start of one of the blocks. Fast enough to be asked all the time."""
        return any(self.blocks[block, 0] != self._expected[block, 0] for block in blocks)

    def check(self, blocks: Sequence[int] | None = None) -> None:
        """Compare every byte with what was last put there on purpose.

        Raises
        ------
        AssertionError
            Names the first block that somebody else has written.
        """
        for block in range(len(self.tags)) if blocks is None else blocks:
            wrong = np.flatnonzero(self.blocks[block] != self._expected[block])
            if len(wrong):
                found = int(self.blocks[block][wrong[0]] - self._ramp[wrong[0]])
                raise AssertionError(
                    f"{self.name}: {len(wrong)} of {self._ramp.size} words of block {block} are not of "
                    f"tag {self.tags[block]}; the first, at {wrong[0]}, is of tag {found}"
                )

    def close(self) -> None:
        """Close the node."""
        self.node.close()
