"""What moves the blocks of `kvlink bench transfer`: kvlink itself, memcpy, and whoever else can be asked to."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

import kvlink
from kvlink import _native
from kvlink.bench.lane_reasons import lane_reasons
from kvlink.bench.scattered import Geometry, Pool, Table, permutation, run_offsets
from kvlink.bench.source import SEED
from kvlink.testing import Worker

__all__ = [
    "DEADLINE_S",
    "KvlinkSystem",
    "MemcpySystem",
    "Moved",
    "Setting",
    "Source",
    "System",
    "Tables",
    "request_tables",
]

DEADLINE_S = 120.0

Tables = tuple[Table, Table]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is measured: one row a system."""

    geometry: Geometry
    lane: str
    memory: str
    threads: int
    repeat: int


@dataclass(frozen=True, kw_only=True)
class Moved:
    """One repetition of one system. `post_s` is None where a system does not tell it."""

    seconds: float
    cpu_source_s: float
    cpu_target_s: float
    lane: str
    verified: bool
    post_s: float | None = None


class System(Protocol):
    """Moves the blocks of one request after another from a pool to another. Owns both pools, and whatever it starts."""

    name: str
    op: str
    memory: str

    def move(self, tables: Tables) -> Moved:
        """Move the source's blocks to the target's, verify every byte, and tell how long it took."""
        ...

    def reason(self) -> str:
        """Say why, or how, it moves them as it does. After the last `move`."""
        ...

    def close(self) -> None:
        """End whatever was started. Safe to call twice."""
        ...


def request_tables(geometry: Geometry, index: int) -> Tables:
    """Return the source's and the target's table of one request."""
    return permutation(geometry, seed=2 * index), permutation(geometry, seed=2 * index + 1)


class Source(Protocol):
    """Obeys calls of a `BenchSource`, in another process or on another host."""

    def call(self, method: str, *args: Any, timeout_s: float = ...) -> Any:
        """Return what the method returns."""
        ...

    def kill(self) -> None:
        """End it. Safe to call twice."""
        ...


class KvlinkSystem:
    """A node here that pulls from one in another process."""

    name = "kvlink"
    op = "pull"

    def __init__(self, setting: Setting) -> None:
        """Start both nodes."""
        arguments = {"geometry": setting.geometry, "memory": setting.memory, "threads": setting.threads}
        self._prepare(setting, node={})
        try:
            self._source: Source = Worker("kvlink.bench.source:BenchSource", arguments=arguments)
        except BaseException:
            self._node.close()
            raise

    def _prepare(self, setting: Setting, *, node: dict[str, Any]) -> None:
        """Start the node here, with these settings beside its own."""
        self.memory = setting.memory
        self._geometry = setting.geometry
        self._required = None if setting.lane == "auto" else setting.lane
        self._pool = Pool(setting.geometry, memory=setting.memory)
        self._node = kvlink.Node(self._pool.cache(), name="bench-target", copy_threads=setting.threads, **node)

    def move(self, tables: Tables) -> Moved:
        """Move the blocks of one request by a handoff, from the call of pull until the source has confirmed it."""
        source_table, target_table = tables
        self._pool.forget()
        ticket = self._source.call("offer", source_table)
        cpu_started, started = time.process_time(), time.perf_counter()
        pull = self._node.pull(ticket, target_table, deadline_s=DEADLINE_S, require=self._required)
        pull.wait(timeout_s=DEADLINE_S)
        seconds, cpu_target_s = time.perf_counter() - started, time.process_time() - cpu_started
        return Moved(
            seconds=seconds,
            cpu_source_s=self._source.call("finish", timeout_s=DEADLINE_S),
            cpu_target_s=cpu_target_s,
            lane=pull.lane,
            verified=self._pool.holds(source_table=source_table, target_table=target_table, seed=SEED),
            post_s=pull.phases_s["post"],
        )

    def reason(self) -> str:
        """Return what the node says of the lanes that it has."""
        return lane_reasons(self._node)

    def close(self) -> None:
        """Close both nodes and end the other process."""
        self._node.close()
        self._source.kill()


class MemcpySystem:
    """The C library's memcpy on one thread, between two private pools of this process."""

    name = "memcpy"
    op = "copy"
    memory = "private"

    def __init__(self, setting: Setting) -> None:
        """Fill a source, and make a target."""
        self._geometry = setting.geometry
        self._source = Pool(setting.geometry, memory="private")
        self._source.fill(seed=SEED)
        self._target = Pool(setting.geometry, memory="private")

    def move(self, tables: Tables) -> Moved:
        """Copy the blocks of one request."""
        source_table, target_table = tables
        self._target.forget()
        cpu_started = time.process_time()
        seconds = _native.memcpy_seconds(
            source=self._source.bytes,
            target=self._target.bytes,
            source_offsets=run_offsets(self._geometry, source_table),
            target_offsets=run_offsets(self._geometry, target_table),
            run_bytes=self._geometry.block_bytes,
        )
        return Moved(
            seconds=seconds,
            cpu_source_s=0.0,
            cpu_target_s=time.process_time() - cpu_started,
            lane="memcpy",
            verified=self._target.holds(source_table=source_table, target_table=target_table, seed=SEED),
        )

    def reason(self) -> str:
        """Say what it is."""
        return "one thread, no other process"

    def close(self) -> None:
        """Nothing was started."""
