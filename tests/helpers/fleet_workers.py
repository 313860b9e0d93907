"""Prefill and decode workers of a fleet whose members die, come and wait for each other."""

from __future__ import annotations

import asyncio
import queue
import random
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

import kvlink
from kvlink.directory import Directory, EtcdDirectory, StaticDirectory, WorkerEntry
from kvlink.scheduler import Arrival, DecodeService, PoolAllocator, Scheduler

TOKENS = 4
MOST_BLOCKS = 12
_TTL_S = 30.0
#: A request keeps its blocks for up to so long, as if it were decoded.
_DECODED_S = 0.01
#: Requests that one half of a prefill worker's share has under way.
AT_ONCE = 6


def value_of(request: int, index: int) -> int:
    """Return what block `index` of a request holds, in every word."""
    return request << 8 | index


class _Memory:
    """Blocks of words, and who has them."""

    def __init__(self, blocks: int) -> None:
        self._owner = kvlink.empty((2, blocks, TOKENS, 2, 64), "uint32")
        self.tensor = np.frombuffer(self._owner, dtype=np.uint32).reshape(2, blocks, TOKENS, 2, 64)
        self.cache = kvlink.KVCache.from_tensors(
            {"layers.0": self.tensor}, axes="kv block token head dim", block_tokens=TOKENS
        )
        self.pool = kvlink.BlockPool(blocks, shuffle_seed=1)


def _directory(etcd: str | None) -> Directory:
    return StaticDirectory() if etcd is None else EtcdDirectory([etcd], ttl_s=2.0)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What became of one request, as its scheduler tells."""

    request: int
    worker: str = ""
    tried: tuple[str, ...] = ()
    error: str = ""


class DecodeMember:
    """A decode worker that checks every request that arrives, and then keeps it for a moment."""

    def open(self, name: str, *, blocks: int, etcd: str | None) -> WorkerEntry:
        """Start, and return how it is listed."""
        self._memory = _Memory(blocks)
        self._node = kvlink.Node(self._memory.cache, name=name, copy_threads=1)
        self._arrived: Counter[int] = Counter()
        self._wrong: list[str] = []
        self._decoding: queue.SimpleQueue[Arrival | None] = queue.SimpleQueue()
        self._directory = _directory(etcd)
        self._service = DecodeService(
            self._node,
            PoolAllocator({"full": self._memory.pool}),
            on_ready=self._check,
            directory=self._directory if etcd is not None else None,
        )
        threading.Thread(target=self._decode, daemon=True).start()
        return self._service.entry()

    def count(self) -> int:
        """Return how many requests have arrived."""
        return sum(self._arrived.values())

    def close(self) -> dict[str, Any]:
        """End, and tell everything."""
        self._service.close()
        self._decoding.put(None)
        counts = self._memory.pool.counts()
        self._directory.close()
        self._node.close()
        return {"arrived": dict(self._arrived), "wrong": self._wrong, "held": counts.held - self._held()}

    def _held(self) -> int:
        held = 0
        while True:
            try:
                arrival = self._decoding.get_nowait()
            except queue.Empty:
                return held
            held += len(arrival.blocks["full"]) if arrival is not None else 0

    def _check(self, arrival: Arrival) -> None:
        request = int(arrival.label)
        for index, block in enumerate(arrival.blocks["full"][: arrival.num_tokens // TOKENS]):
            if not (self._memory.tensor[:, block] == value_of(request, index)).all():
                self._wrong.append(f"block {index} of request {request}")
        if arrival.payload != str(request).encode():
            self._wrong.append(f"payload of request {request}")
        self._arrived[request] += 1
        self._decoding.put(arrival)

    def _decode(self) -> None:
        rng = random.Random(1)
        while (arrival := self._decoding.get()) is not None:
            threading.Event().wait(rng.uniform(0, _DECODED_S))
            self._service.finish(arrival)


class PrefillMember:
    """A prefill worker that hands over one request after the other, some at a time."""

    def open(self, name: str, *, blocks: int, etcd: str | None) -> None:
        """Start."""
        self._memory = _Memory(blocks)
        self._node = kvlink.Node(self._memory.cache, name=name, copy_threads=1)
        self._directory = _directory(etcd)
        self._scheduler = Scheduler(self._node, directory=self._directory)
        self._ended: list[Ended] = []
        self._threads: list[threading.Thread] = []

    def put(self, entry: WorkerEntry) -> None:
        """List a decode worker, where that is not etcd's."""
        assert isinstance(self._directory, StaticDirectory)
        self._directory.put(entry)

    def begin(self, requests: range, *, seed: int) -> None:
        """Hand all of them over, in a thread and a loop of their own."""
        thread = threading.Thread(target=self._work, args=(requests, seed))
        self._threads.append(thread)
        thread.start()

    def progress(self) -> int:
        """Return how many have ended."""
        return len(self._ended)

    def result(self, *, timeout_s: float) -> tuple[list[Ended], int]:
        """Wait for the end; return what became of each, and the blocks that are held still."""
        for thread in self._threads:
            thread.join(timeout=timeout_s)
            assert not thread.is_alive(), f"{len(self._ended)} have ended"
        return self._ended, self._memory.pool.counts().held

    def _work(self, requests: range, seed: int) -> None:
        try:
            asyncio.run(self._run(requests, random.Random(seed)))
        except BaseException as error:
            self._ended.append(Ended(request=-1, error=repr(error)))
            raise

    def close(self) -> None:
        """End."""
        self._scheduler.close()
        self._directory.close()
        self._node.close()

    async def _run(self, requests: range, rng: random.Random) -> None:
        waiting = iter(requests)

        async def one_after_the_other() -> None:
            for request in waiting:
                self._ended.append(await self._hand_off(request, rng.randint(1, MOST_BLOCKS)))

        await asyncio.gather(*(one_after_the_other() for _ in range(AT_ONCE)))

    async def _hand_off(self, request: int, count: int) -> Ended:
        blocks = self._memory.pool.allocate(count)
        try:
            for index, block in enumerate(blocks):
                self._memory.tensor[:, block] = value_of(request, index)
            placement = await self._scheduler.place(num_tokens=TOKENS * (count + 1), deadline_s=_TTL_S)
            report = await self._scheduler.hand_off(
                placement,
                blocks=blocks,
                num_tokens=TOKENS * count,
                ttl_s=_TTL_S,
                label=str(request),
                payload=str(request).encode(),
            )
        except kvlink.KvlinkError as error:
            return Ended(request=request, error=f"{type(error).__name__}: {error}")
        finally:
            self._memory.pool.free(blocks)
        return Ended(request=request, worker=report.worker, tried=tuple(str(one.error) for one in report.tried))
