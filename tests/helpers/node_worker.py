"""What runs inside a worker process of the tests: one node, its memory, and its handles by number."""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import os
import select
import signal
import time
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

import kvlink
from helpers import dialect_0
from helpers.patterns import Geometry, Placement, canonical, carve, fill_random, flat_bytes
from kvlink.handoff.asking import ask
from kvlink.testing import FaultScript, inject_faults


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What a handle says about itself."""

    state: str
    released: bool
    error: str | None
    message: str
    failed: tuple[Any, ...]
    valid_prefix_tokens: int | None
    lane: str
    nbytes: int
    payload: bytes
    phases_s: dict[str, float]


class NodeWorker:
    """A node and its memory. Every method answers within the time it is given."""

    def __init__(self) -> None:
        self._node: Any = None
        self._flat: Any = None
        self._owner: Any = None
        self._handles: list[Any] = []

    def open(self, geometry: Geometry, placement: Placement, *, seed: int, **options: Any) -> dict[str, Any]:
        """Fill new memory with the seed's bytes and start a node over it."""
        self.shut()
        cache = self._new_cache(geometry, placement, seed=seed)
        started = time.perf_counter()
        self._node = kvlink.Node(cache, name=options.pop("name", f"worker-{os.getpid()}"), **options)
        return {"seconds": time.perf_counter() - started, "address": self._node.address, "pid": os.getpid()}

    def resume(self, geometry: Geometry, placement: Placement, *, seed: int) -> None:
        """Let the suspended node's memory go, fill new memory with the seed's bytes, and go on with that."""
        self._owner = self._flat = None
        self._handles = []  # each keeps the native core of its life, which has ended
        self._node.resume(self._new_cache(geometry, placement, seed=seed))

    def speak(self, versions: list[int]) -> None:
        """Speak only these versions of the protocol from now on; 0 is the frozen one."""
        dialect_0.speak(versions)

    def spoken(self) -> list[int]:
        """How many messages of the frozen dialect were written and read here."""
        return list(dialect_0.spoken)

    def ask(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the node, or read one of its properties."""
        found = getattr(self._node, method)
        return found(*args, **options) if callable(found) else found

    def _new_cache(self, geometry: Geometry, placement: Placement, *, seed: int) -> kvlink.KVCache:
        self._shape = (geometry, placement)
        size = flat_bytes(geometry, placement)
        if placement.memory == "pool":
            self._owner = kvlink.empty((size,), "uint8")
            self._flat = np.frombuffer(self._owner, dtype=np.uint8)
        else:
            self._flat = np.empty(size, dtype=np.uint8)
        fill_random(self._flat, seed=seed)
        return kvlink.KVCache.from_tensors(
            carve(self._flat, geometry, placement),
            axes=placement.axes_text,
            block_tokens=placement.block_tokens,
            dtype=geometry.tag,
        )

    def shut(self) -> None:
        """Close the node, if there is one, and let its memory go."""
        if self._node is not None:
            self._node.close()
        self._node = self._flat = self._owner = None
        self._handles = []

    def offer(self, blocks: Any, num_tokens: int, **options: Any) -> tuple[int, dict[str, Any]]:
        """Offer blocks; returns the handle's number and the ticket."""
        handle = self._node.offer(blocks=blocks, num_tokens=num_tokens, **options)
        return self._keep(handle), handle.ticket

    def pull(self, ticket: Any, blocks: Any, **options: Any) -> int:
        """Start a pull and return its handle's number."""
        return self._keep(self._node.pull(ticket, blocks=blocks, **options))

    def reserve(self, blocks: Any, num_tokens: int, **options: Any) -> tuple[int, dict[str, Any]]:
        """Reserve blocks; returns the handle's number and the ticket."""
        handle = self._node.reserve(blocks, num_tokens=num_tokens, **options)
        return self._keep(handle), handle.ticket

    def push(self, ticket: Any, blocks: Any, **options: Any) -> int:
        """Start a push and return its handle's number."""
        return self._keep(self._node.push(ticket, blocks, **options))

    def tell(self, handle: int, *said: tuple[str, dict[str, Any]]) -> None:
        """Call methods of a handle, one after another."""
        for method, options in said:
            getattr(self._handles[handle], method)(**options)

    def pull_and_cancel(self, ticket: Any, blocks: Any, *, after_s: float, **options: Any) -> int:
        """Start a pull and cancel it a moment later, which may be shorter than the kernel's timers."""
        handle = self.pull(ticket, blocks, **options)
        until = time.perf_counter() + after_s
        while time.perf_counter() < until:
            pass
        self.cancel(handle)
        return handle

    def wait(self, handle: int, *, timeout_s: float = 20.0) -> Snapshot:
        """Wait for the outcome; raises the handoff's error."""
        self._handles[handle].wait(timeout_s=timeout_s)
        return self.snapshot(handle)

    def wait_by_await(self, handle: int, *, timeout_s: float = 20.0) -> Snapshot:
        """The same with ``await``, on an event loop that has other work to do."""

        async def main() -> int:
            ticks = 0

            async def tick() -> None:
                nonlocal ticks
                while True:
                    ticks += 1
                    await asyncio.sleep(0)  # lets the others of this loop go on

            other = asyncio.ensure_future(tick())
            await asyncio.wait_for(_awaited(self._handles[handle]), timeout_s)
            other.cancel()
            return ticks

        assert asyncio.run(main()) > 0
        return self.snapshot(handle)

    def wait_by_poll(self, handle: int, *, timeout_s: float = 20.0) -> tuple[Snapshot, float]:
        """The same with ``poll`` and the node's file descriptor; also returns the longest single poll."""
        deadline = time.monotonic() + timeout_s
        slowest_s = 0.0
        poller = select.poll()
        poller.register(self._node.fileno(), select.POLLIN)
        while True:
            began = time.perf_counter()
            done = self._handles[handle].poll()
            slowest_s = max(slowest_s, time.perf_counter() - began)
            if done:
                return self.snapshot(handle), slowest_s
            if time.monotonic() > deadline:
                raise AssertionError(f"no outcome in {timeout_s} s: {self.snapshot(handle)}")
            poller.poll(20)

    def wait_released(self, handle: int, *, timeout_s: float = 20.0) -> Snapshot:
        """Wait until nothing can touch the blocks any more."""
        released = self._handles[handle].wait_released(timeout_s=timeout_s)
        assert released is not False, self.snapshot(handle)
        assert self._handles[handle].released
        return self.snapshot(handle)

    def cancel(self, handle: int) -> None:
        """Cancel a handoff."""
        self._handles[handle].cancel()

    def snapshot(self, handle: int) -> Snapshot:
        """What the handle says now."""
        kept = self._handles[handle]
        error = kept.error
        return Snapshot(
            state=kept.state,
            released=kept.released,
            error=type(error).__name__ if error is not None else None,
            message=str(error) if error is not None else "",
            failed=tuple(getattr(error, "failed", ())),
            valid_prefix_tokens=getattr(error, "valid_prefix_tokens", None),
            lane=getattr(kept, "lane", ""),
            nbytes=getattr(kept, "bytes", 0),
            payload=kept.payload if kept.outcome == "succeeded" and hasattr(type(kept), "payload") else b"",
            phases_s=dict(getattr(kept, "phases_s", {})),
        )

    def signal_when_moving(self, handle: int, *, pid: int, signum: int, timeout_s: float = 20.0) -> str:
        """Send a signal the moment the handoff's bytes begin to move; returns the state seen then."""
        state = self._spin_until_moving(handle, timeout_s)
        os.kill(pid, signum)
        return state

    def watch_moving(self, handle: int, *, timeout_s: float = 20.0) -> str:
        """Return the state in which the handoff's bytes are first seen to move."""
        return self._spin_until_moving(handle, timeout_s)

    def cancel_when_moving(self, handle: int, *, timeout_s: float = 20.0) -> str:
        """Cancel the moment the handoff's bytes begin to move; returns the state seen then."""
        state = self._spin_until_moving(handle, timeout_s)
        self._handles[handle].cancel()
        return state

    def cancel_when_moved(self, handle: int) -> str:
        """Cancel the moment what has moved is summed or converted; returns the state seen then."""
        state = self._spin_until_moving(handle, 20.0, more=("moving",))
        self._handles[handle].cancel()
        return state

    def close_when_moved(self, handle: int) -> str:
        """Close the node at that moment; returns the state seen then."""
        state = self._spin_until_moving(handle, 20.0, more=("moving",))
        self._node.close()
        return state

    def kill_when_checking(self, handle: int, *, pid: int) -> str:
        """Kill a process while both sides sum what has moved, unless that is over; returns the state seen then."""
        state = self._spin_until_moving(handle, 20.0, more=("moving",))
        if state == "checking":
            os.kill(pid, signal.SIGKILL)
        return state

    def inject_faults(self, **script: Any) -> None:
        """Make what is pulled from now on go wrong."""
        inject_faults(self._node, FaultScript(**script))

    def suspend_when_moving(self, handle: int, *, deadline_s: float, timeout_s: float = 20.0) -> str:
        """Suspend the node the moment the handoff's bytes begin to move; returns the state seen then."""
        state = self._spin_until_moving(handle, timeout_s)
        self._node.suspend(deadline_s=deadline_s)
        return state

    def close_when_moving(self, handle: int, *, timeout_s: float = 20.0) -> str:
        """Close the node the moment the handoff's bytes begin to move; returns the state seen then."""
        state = self._spin_until_moving(handle, timeout_s)
        self._node.close()
        return state

    def _spin_until_moving(self, handle: int, timeout_s: float, *, more: tuple[str, ...] = ()) -> str:
        """Watch without a pause: the whole transfer takes only tens of milliseconds."""
        deadline = time.monotonic() + timeout_s
        kept = self._handles[handle]
        while (state := str(kept.state)) in ("connecting", "reserved", "claiming", "filling", "waiting", *more):
            if time.monotonic() > deadline:
                raise AssertionError(f"the handoff never began to move: {self.snapshot(handle)}")
        return state

    def hold_gil(self, seconds: float) -> tuple[float, float]:
        """Keep the interpreter's lock, as a long call of a C extension does; returns when it did (monotonic)."""
        began = time.monotonic()
        ctypes.PyDLL(None).usleep(ctypes.c_uint(int(seconds * 1e6)))
        return began, time.monotonic()

    def memory(self) -> np.ndarray:
        """A copy of all of the memory, gaps and padding included."""
        return np.array(self._flat)

    def fill(self, *, seed: int) -> None:
        """Overwrite all of the memory, as an engine that reuses its blocks does."""
        fill_random(self._flat, seed=seed)

    def checksums(self, blocks: list[int]) -> list[int]:
        """One number for all that each block holds, the same on both sides of a right handoff."""
        geometry, placement = self._shape
        parts = canonical(carve(self._flat, geometry, placement), placement)
        return [zlib.crc32(b"".join(parts[key][block].tobytes() for key in sorted(parts))) for block in blocks]

    def put(self, address: str, kind: str, body: bytes) -> bytes:
        """Ask another node something."""
        return ask(self._node, address, kind, body=body, deadline_s=10)

    def descriptor(self) -> dict[str, Any]:
        """What the node tells a scheduler about itself."""
        return dict(self._node.descriptor)

    def peers(self) -> list[dict[str, Any]]:
        """The node's peers, as plain data."""
        return [_plain(peer) for peer in self._node.peers()]

    def holds(self) -> dict[str, int]:
        """How many blocks and handoffs the node still holds."""
        return dict(self._node.holds())

    def address(self) -> str:
        """Where the node listens."""
        return str(self._node.address)

    def drop_peer(self, name: str) -> None:
        """Drop a peer by name."""
        self._node.drop_peer(name)

    def close_node(self) -> None:
        """Close the node and keep everything else."""
        self._node.close()

    def fork_and_use(self, *, leave: str, timeout_s: float = 10.0) -> tuple[str, int]:
        """Use the node in a forked child; returns what happened there and the child's exit code.

        The child leaves by `os._exit`, or runs the exit handlers that it inherited first.
        """
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write_end, _attempt(lambda: self._node.offer(blocks=[0], num_tokens=1)).encode())
            if leave == "exit":
                atexit._run_exitfuncs()
            os._exit(0)
        os.close(write_end)
        ready, _, _ = select.select([read_end], [], [], timeout_s)
        said = os.read(read_end, 4096).decode() if ready else "nothing"
        ended, _, _ = select.select([read_end], [], [], timeout_s)  # end of file: the child is gone
        if not ended:
            os.kill(child, signal.SIGKILL)
        os.close(read_end)
        return said, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def fork_and_stay(self, *, most_s: int = 30) -> int:
        """Fork a child that does nothing until it is killed; returns its number."""
        child = os.fork()
        if child == 0:
            signal.alarm(most_s)
            signal.pause()
        return child

    def _keep(self, handle: Any) -> int:
        self._handles.append(handle)
        return len(self._handles) - 1


async def _awaited(handle: Any) -> Any:
    return await handle


def _attempt(action: Any) -> str:
    try:
        action()
    except Exception as error:  # noqa: BLE001 - whatever happened is the answer
        return f"{'typed ' if isinstance(error, kvlink.KvlinkError) else ''}{type(error).__name__}: {error}"
    return "no error"


def _plain(peer: Any) -> dict[str, Any]:
    if isinstance(peer, dict):
        return peer
    return {name: getattr(peer, name) for name in dir(peer) if not name.startswith("_")}
