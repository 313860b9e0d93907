"""A scheduler's prefill side and decode workers that run a service, in one process."""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import kvlink
from kvlink.directory import StaticDirectory
from kvlink.scheduler import Arrival, DecodeService, PoolAllocator, Scheduler

BLOCKS, TOKENS = 32, 4


class Memory:
    """A cache whose blocks are filled with one number each."""

    def __init__(self, blocks: int = BLOCKS, heads: int = 2, part: Mapping[str, Any] | None = None) -> None:
        self.tensor = np.zeros((2, blocks, TOKENS, heads, 8), dtype="float32")
        self.cache = kvlink.KVCache.from_tensors(
            {"layers.0": self.tensor}, axes="kv block token head dim", block_tokens=TOKENS, **(part or {})
        )

    def values(self, blocks: Sequence[int]) -> list[float]:
        """Return the number in each block, which must be the same all over it."""
        found = [np.unique(self.tensor[:, block]) for block in blocks]
        assert all(len(values) == 1 for values in found)
        return [float(values[0]) for values in found]


class Decoder:
    """A decode worker of this process."""

    def __init__(
        self, name: str, directory: StaticDirectory | None, *, blocks: int = BLOCKS, heads: int = 2, **options: Any
    ) -> None:
        self.memory = Memory(blocks, heads)
        self.node = kvlink.Node(self.memory.cache, name=name, copy_threads=1)
        self.pool = kvlink.BlockPool(blocks)
        self.arrived: queue.Queue[Arrival] = queue.Queue()
        self.service = DecodeService(
            self.node,
            PoolAllocator({"full": self.pool}),
            on_ready=self.arrived.put,
            directory=directory,
            **options,
        )

    def close(self) -> None:
        self.service.close()
        self.node.close()


class Prefill:
    """The prefill side: a scheduler over a node."""

    def __init__(self, directory: StaticDirectory, *, memory: Memory | None = None, **options: Any) -> None:
        self.memory = memory or Memory()
        self.node = kvlink.Node(self.memory.cache, name="prefill-0", copy_threads=1)
        self.scheduler = Scheduler(self.node, directory=directory, **options)

    async def hand_off(self, *blocks: int, room: int = 0, **options: Any) -> Any:
        for block in blocks:
            self.memory.tensor[:, block] = block + 1
        num_tokens = TOKENS * len(blocks)
        placement = await self.scheduler.place(num_tokens=num_tokens + room, deadline_s=5)
        return await self.scheduler.hand_off(
            placement, blocks=list(blocks), num_tokens=num_tokens, **{"ttl_s": 10, **options}
        )

    def close(self) -> None:
        self.scheduler.close()
        self.node.close()
