"""Worker processes that run a node each: spawned, obeyed, killed, and always reaped."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from helpers.markers import Lane
from helpers.node_worker import Snapshot
from helpers.nursery import Nursery
from helpers.patterns import Geometry, Placement, Request, Side, first_difference, hand_over
from kvlink.testing import Worker

TESTS = Path(__file__).parents[1]


def spawn_node_worker(env: Mapping[str, str] | None = None) -> Worker:
    """Start a process that obeys the methods of `helpers.node_worker.NodeWorker`."""
    return spawn_worker("helpers.node_worker:NodeWorker", env)


def spawn_worker(factory: str, env: Mapping[str, str] | None = None, **arguments: Any) -> Worker:
    """Start a process that makes an object of the tests' own helpers and obeys its methods."""
    return _WarmWorker(factory, arguments=arguments, env=env, python_path=[str(TESTS)])


class _WarmWorker(Worker):
    """One that the nursery forks, unless its environment asks for an interpreter of its own."""

    _nursery: ClassVar[Nursery | None] = None

    def _begin(self, pipe_fd: int, env: dict[str, str], python_path: Sequence[str]) -> Any:
        nursery = _WarmWorker._nursery = _WarmWorker._nursery or Nursery()
        if not nursery.can_give(env):
            return super()._begin(pipe_fd, env, python_path)
        return nursery.fork(pipe=pipe_fd, stderr=self._stderr.fileno(), env=env, python_path=python_path)


class Pair:
    """A source and a target process, and what the reference says their memory holds."""

    def __init__(self, source: Worker, target: Worker, lane: Lane) -> None:
        self.source = source
        self.target = target
        self.lane = lane

    def open(
        self,
        geometry: Geometry | None = None,
        *,
        source: Placement | None = None,
        target: Placement | None = None,
        seed: int = 1,
        target_geometry: Geometry | None = None,
        convert: tuple[str, ...] = (),
        target_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Start a node in either process over fresh memory; returns what the source's said.

        `options` are for both, but where `target_options` have another for the target.
        """
        self.geometry = geometry or Geometry()
        of_target = target_geometry or self.geometry
        placements = [placement or Placement(memory=self.lane.memory) for placement in (source, target)]
        self.expected_source = Side.random(self.geometry, placements[0], seed=2 * seed)
        self.expected_target = Side.random(of_target, placements[1], seed=2 * seed + 1)
        self.source.start("open", self.geometry, placements[0], seed=2 * seed, name="source", **options)
        options.update(target_options or {})
        self.target.start(
            "open", of_target, placements[1], seed=2 * seed + 1, name="target", convert=convert, **options
        )
        self.target.result()
        opened: dict[str, Any] = self.source.result()
        return opened

    def shut(self) -> None:
        """Close both nodes."""
        self.source.start("shut")
        self.target.call("shut")
        self.source.result()

    def offer(self, request: Request, **options: Any) -> tuple[int, dict[str, Any]]:
        """Offer the request's source blocks."""
        handle: tuple[int, dict[str, Any]]
        handle = self.source.call("offer", list(request.source_blocks), request.num_tokens, **options)
        return handle

    def pull(self, ticket: Any, request: Request, **options: Any) -> int:
        """Start the request's pull on the lane under test."""
        options = {"require": self.lane.lane, "skip_tokens": request.skip_tokens, **options}
        handle: int = self.target.call("pull", ticket, list(request.target_blocks), **options)
        return handle

    def reserve(self, request: Request, **options: Any) -> tuple[int, dict[str, Any]]:
        """Reserve the request's target blocks on the lane under test."""
        options = {"require": self.lane.lane, "skip_tokens": request.skip_tokens, "ttl_s": 20, **options}
        handle: tuple[int, dict[str, Any]]
        handle = self.target.call("reserve", list(request.target_blocks), request.num_tokens, **options)
        return handle

    def push(self, ticket: Any, request: Request, *said: tuple[str, dict[str, Any]], **options: Any) -> int:
        """Start the request's push, and say so much about it."""
        pushed: int = self.source.call("push", ticket, list(request.source_blocks), **options)
        if said:
            self.source.call("tell", pushed, *said)
        return pushed

    def push_over(self, request: Request, *said: tuple[str, dict[str, Any]], **options: Any) -> Snapshot:
        """Reserve, push, wait for both sides to release, and compare all memory with the reference."""
        reserved, ticket = self.reserve(request)
        pushed = self.push(ticket, request, *said, **options)
        taken: Snapshot = self.target.call("wait", reserved)
        self.expect(request)
        self.target.call("wait_released", reserved)
        self.source.call("wait", pushed)
        self.source.call("wait_released", pushed)
        self.verify()
        return taken

    def open_large(self, blocks: int) -> None:
        """Start nodes with one copy thread over memory large enough to be caught in the middle of a transfer.

        Each block is 2 MiB. No reference is kept: `assert_equal_blocks` compares block by block.
        """
        self.geometry = Geometry(layers=("layers.0",), heads=8, head_dim=8192)
        placement = Placement(num_blocks=blocks, memory=self.lane.memory)
        self.source.start("open", self.geometry, placement, seed=2, name="source", copy_threads=1)
        self.target.start("open", self.geometry, placement, seed=3, name="target", copy_threads=1)
        self.source.result()
        self.target.result()

    def hand_over(self, request: Request, **options: Any) -> Snapshot:
        """Offer, pull, wait for both sides to release, and compare all memory with the reference."""
        offered, ticket = self.offer(request, **options)
        pulled = self.pull(ticket, request)
        taken: Snapshot = self.target.call("wait", pulled)
        self.expect(request)
        self.target.call("wait_released", pulled)
        self.source.call("wait", offered)
        self.source.call("wait_released", offered)
        self.verify()
        return taken

    def assert_equal_blocks(self, request: Request) -> None:
        """Compare the whole blocks that a handoff moved, by checksum."""
        sums = []
        for worker, blocks in ((self.source, request.source_blocks), (self.target, request.target_blocks)):
            sums.append(worker.call("checksums", list(blocks)))
        assert sums[0] == sums[1]

    def expect(self, request: Request) -> None:
        """Apply a request to the reference."""
        hand_over(self.expected_source, self.expected_target, request)

    def verify(self) -> None:
        """Compare every byte of both memories, gaps and padding included, with the reference."""
        self.verify_target()
        wrong = first_difference(self.source.call("memory"), self.expected_source.flat)
        assert not wrong, f"source: {wrong}"

    def verify_target(self) -> None:
        """Compare every byte of the target's memory with the reference."""
        wrong = first_difference(self.target.call("memory"), self.expected_target.flat)
        assert not wrong, f"target: {wrong}"

    def holds(self) -> list[int]:
        """All counts of what both nodes still hold."""
        return [count for worker in (self.source, self.target) for count in worker.call("holds").values()]


def wait_until(condition: Callable[[], object], *, timeout_s: float, what: str | Callable[[], str]) -> None:
    """Wait for something that has no event of its own, such as the kernel's view of a process."""
    deadline = time.monotonic() + timeout_s
    poller = select.poll()
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what if isinstance(what, str) else what()}"
        poller.poll(5)


def run_python(
    code: str, *, timeout_s: float = 30.0, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script in a fresh interpreter; bounded, and killed with its children if it is late.

    Bytecode may be cached, as in any ordinary environment: times would not be a user's otherwise.
    """
    with _process_group([sys.executable, "-c", code], {"PYTHONDONTWRITEBYTECODE": "", **(env or {})}) as process:
        out, err = process.communicate(timeout=timeout_s)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@contextlib.contextmanager
def _process_group(command: list[str], env: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **env},
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=30)
