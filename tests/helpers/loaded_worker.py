"""What runs inside a worker process of the tests of endurance: a node that others disturb while it works."""

from __future__ import annotations

import contextlib
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np

import kvlink
from helpers.node_worker import NodeWorker
from helpers.process_usage import usage
from helpers.processes import wait_until
from kvlink.testing import FaultScript, inject_faults, remove_faults

OUTCOME_S = 20.0
#: Shape and words of the cache of a node that is one of many.
SMALL = {"axes": "kv block token head dim", "block_tokens": 4}


class LoadedWorker(NodeWorker):
    """A node worker with pulls going on beside what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self._began: dict[int, float] = {}
        self._many: list[Any] = []
        self._stop = threading.Event()
        self._load: threading.Thread | None = None

    def measure(self, ticket: Any, block: int, *, seconds: float, require: str | None = None) -> list[float]:
        """Pull an offer of one block again and again; returns the seconds that each took."""
        until = time.monotonic() + seconds
        taken: list[float] = []
        while time.monotonic() < until:
            began = time.perf_counter()
            pull = self._node.pull(ticket, blocks=[block], require=require, deadline_s=OUTCOME_S)
            pull.wait(timeout_s=OUTCOME_S)
            taken.append(time.perf_counter() - began)
            assert pull.wait_released(timeout_s=OUTCOME_S)
        return taken

    def start_load(self, ticket: Any, block: int, *, require: str | None = None) -> None:
        """Pull an offer of one block again and again, until `stop_load`."""
        self._stop.clear()
        self._pulled, self._load_error = 0, ""

        def run() -> None:
            try:
                while not self._stop.is_set():
                    self._pulled += len(self.measure(ticket, block, seconds=0.01, require=require))
            except Exception as error:  # noqa: BLE001 - the top of a thread: whoever stops it is told
                self._load_error = f"{type(error).__name__}: {error}"

        self._load = threading.Thread(target=run)
        self._load.start()

    def stop_load(self) -> tuple[int, str]:
        """End the load; returns how many pulls succeeded and the error that ended it before its time."""
        assert self._load is not None
        self._stop.set()
        self._load.join(timeout=2 * OUTCOME_S)
        return self._pulled, self._load_error

    def offer_timed(self, blocks: Any, num_tokens: int, **options: Any) -> tuple[int, dict[str, Any]]:
        """Offer, and look at the clock."""
        began = time.monotonic()
        handle, ticket = self.offer(blocks, num_tokens, **options)
        self._began[handle] = began
        return handle, ticket

    def pull_timed(self, ticket: Any, blocks: Any, **options: Any) -> int:
        """Pull, and look at the clock."""
        began = time.monotonic()
        handle = self.pull(ticket, blocks, **options)
        self._began[handle] = began
        return handle

    def reserve_timed(self, blocks: Any, num_tokens: int, **options: Any) -> tuple[int, dict[str, Any]]:
        """Reserve, and look at the clock."""
        began = time.monotonic()
        handle, ticket = self.reserve(blocks, num_tokens, **options)
        self._began[handle] = began
        return handle, ticket

    def push_timed(self, ticket: Any, blocks: Any, **options: Any) -> int:
        """Push all at once, and look at the clock."""
        began = time.monotonic()
        handle = self.push(ticket, blocks, **options)
        self.tell(handle, ("commit", {}))
        self._began[handle] = began
        return handle

    def wait_timed(self, handle: int, *, most_s: float) -> tuple[str | None, float]:
        """Wait for an outcome; returns its error and when it came, counted from `..._timed`."""
        kept = self._handles[handle]
        try:
            kept.wait(timeout_s=most_s)
        except kvlink.KvlinkError:
            assert kept.outcome is not None
        return None if kept.error is None else type(kept.error).__name__, time.monotonic() - self._began[handle]

    def slow_down(self, *, delay_ms: float) -> None:
        """Stretch the pulls that start from now on."""
        inject_faults(self._node, FaultScript(delay_ms=delay_ms))

    def make_right_again(self) -> None:
        """Let the pulls that start from now on take their own time."""
        remove_faults(self._node)

    def usage(self) -> dict[str, int]:
        """See `helpers.process_usage.usage`."""
        return usage()

    def ucx_shared_memory(self) -> dict[str, int]:
        """Checksums of what UCX shares with other processes, by mapping."""
        found = {}
        with Path("/proc/self/mem").open("rb") as memory:
            for line in Path("/proc/self/maps").read_text().splitlines():
                where, mode, *_ = line.split()
                if mode == "rw-s" and ("ucx_shm" in line or "SYSV" in line):
                    begin, end = (int(address, 16) for address in where.split("-"))
                    memory.seek(begin)
                    found[where] = zlib.crc32(memory.read(end - begin))
        return found

    def usage_once_not_above(self, before: dict[str, int]) -> dict[str, int]:
        """The usage, once it is down to `before` or a moment has passed: what a peer has to close takes a while."""
        with contextlib.suppress(AssertionError):
            wait_until(
                lambda: all(count <= before[what] for what, count in self.usage().items() if what != "resident"),
                timeout_s=3,
                what="as before",
            )
        return self.usage()

    def reconnect(self, ticket: Any, block: int, name: str, *, times: int, require: str) -> int:
        """Drop the peer and pull from it again, so many times; returns how many connections were made."""
        connected = set()
        for _ in range(times):
            self._node.drop_peer(name)
            wait_until(lambda: not self._node.peers(), timeout_s=5, what="the peer is dropped")
            pull = self._node.pull(ticket, blocks=[block], require=require, deadline_s=OUTCOME_S)
            pull.wait(timeout_s=OUTCOME_S)
            assert pull.wait_released(timeout_s=OUTCOME_S)
            connected.add(self._node.peers()[0]["peer"])
        return len(connected)

    def forget_handles(self) -> None:
        """Let go of every handle."""
        self._handles = []

    def register_again_and_again(self, *, nodes: int, regions: int) -> None:
        """Open and close nodes, each over as many regions of its own from `kvlink.empty`."""
        for _ in range(nodes):
            tensors = {f"layers.{index}": kvlink.empty((2, 4, 4, 1, 8), "uint16") for index in range(regions)}
            with kvlink.Node(kvlink.KVCache.from_tensors(tensors, **SMALL), name="passing"):
                pass

    def open_many(self, count: int, *, first: int) -> list[dict[str, Any]]:
        """Start so many nodes, each of which offers its number; returns their tickets."""
        tickets = []
        for number in range(first, first + count):
            tensor = np.full((2, 4, 4, 1, 8), number, dtype="uint16")
            cache = kvlink.KVCache.from_tensors({"layers.0": tensor}, **SMALL)
            node = kvlink.Node(cache, name=f"node-{number}")
            offer = node.offer(blocks=[0], num_tokens=4, ttl_s=60)
            self._many.append((node, tensor, offer))
            tickets.append(offer.ticket)
        return tickets

    def pull_many(self, tickets: list[dict[str, Any]]) -> list[int]:
        """Pull one ticket into each of the many nodes at once; returns the numbers that came."""
        pulls = [
            node.pull(ticket, blocks=[1], deadline_s=OUTCOME_S)
            for (node, _, _), ticket in zip(self._many, tickets, strict=True)
        ]
        for pull in pulls:
            pull.wait(timeout_s=OUTCOME_S)
        found = []
        for _, tensor, _ in self._many:
            numbers = set(tensor[:, 1].flat)
            assert len(numbers) == 1, numbers
            found.append(int(numbers.pop()))
        return found

    def close_many(self) -> None:
        """Close the many nodes, once each has been read."""
        for node, _, offer in self._many:
            offer.wait(timeout_s=OUTCOME_S)
            node.close()
        self._many = []
