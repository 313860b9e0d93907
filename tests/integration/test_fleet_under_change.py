"""Four prefill and four decode workers, of which one is killed and another comes while requests are handed over.

Every request arrives at one worker, once, with its own bytes. Only what the killed worker had is gone with it.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.etcd_server import EtcdServer, needs_etcd
from helpers.fleet_workers import AT_ONCE, MOST_BLOCKS, Ended
from helpers.processes import spawn_worker
from helpers.soak import rounds

from kvlink.directory import WorkerEntry
from kvlink.testing import Worker

REQUESTS = rounds(320, 2000)
PREFILL = DECODE = 4
PREFILL_BLOCKS, DECODE_BLOCKS = 2 * AT_ONCE * MOST_BLOCKS, 64
LIMIT_S = 60.0


class Fleet:
    """The processes, and what they have told."""

    def __init__(self, workers: contextlib.ExitStack, etcd: str | None) -> None:
        self._workers = workers
        self._etcd = etcd
        self.decode: dict[str, Worker] = {}
        self.prefill = [self._spawn("PrefillMember") for _ in range(PREFILL)]
        for number, worker in enumerate(self.prefill):
            worker.start("open", f"prefill-{number}", blocks=PREFILL_BLOCKS, etcd=etcd)
        for worker in self.prefill:
            worker.result()
        for number in range(DECODE):
            self.add(f"decode-{number}")

    def _spawn(self, kind: str) -> Worker:
        return self._workers.enter_context(spawn_worker(f"helpers.fleet_workers:{kind}"))

    def add(self, name: str) -> None:
        self.decode[name] = self._spawn("DecodeMember")
        entry: WorkerEntry = self.decode[name].call("open", name, blocks=DECODE_BLOCKS, etcd=self._etcd)
        if self._etcd is None:
            for worker in self.prefill:
                worker.call("put", entry)

    def begin(self, half: int) -> None:
        """Let every prefill worker begin with the first or the second half of its share."""
        share = REQUESTS // PREFILL // 2
        for number, worker in enumerate(self.prefill):
            first = (2 * number + half) * share
            worker.call("begin", range(first, first + share), seed=first)

    def until(self, ended: int) -> None:
        """Wait until so many requests have ended."""
        until = time.monotonic() + LIMIT_S
        while sum(worker.call("progress") for worker in self.prefill) < ended:
            assert time.monotonic() < until
            time.sleep(0.01)

    def kill(self, name: str) -> None:
        self.decode.pop(name).kill()

    def finish(self) -> tuple[list[Ended], dict[str, dict[str, Any]]]:
        """Return what became of each request, and what each living decode worker has got."""
        for worker in self.prefill:
            worker.start("result", timeout_s=LIMIT_S)
        ended: list[Ended] = []
        for worker in self.prefill:
            told, held = worker.result(timeout_s=LIMIT_S + 5)
            assert held == 0
            ended += told
        for worker in (*self.decode.values(), *self.prefill):
            worker.start("close")
        told_by = {name: worker.result() for name, worker in self.decode.items()}
        for worker in self.prefill:
            worker.result()
        return ended, told_by


def check(ended: list[Ended], told_by: dict[str, dict[str, Any]], killed: str) -> None:
    assert [one.error for one in ended if one.error] == []
    assert sorted(one.request for one in ended) == list(range(REQUESTS))
    assert {one.worker for one in ended} <= {*told_by, killed}
    assert [told["wrong"] for told in told_by.values() if told["wrong"]] == []
    assert {told["held"] for told in told_by.values()} == {0}
    for name, told in told_by.items():
        assert set(told["arrived"]) == {one.request for one in ended if one.worker == name}
    arrived = sum((Counter(told["arrived"]) for told in told_by.values()), Counter())
    assert set(arrived.values()) == {1}


@pytest.fixture
def open_fleet() -> Iterator[Callable[..., Fleet]]:
    with contextlib.ExitStack() as workers:
        yield lambda etcd=None: Fleet(workers, etcd)


@pytest.mark.slow
@pytest.mark.expects_warnings
def test_a_fleet_hands_everything_over_while_one_dies_and_another_comes(open_fleet: Callable[..., Fleet]) -> None:
    fleet = open_fleet()
    fleet.begin(0)
    fleet.until(REQUESTS // 4)
    fleet.kill("decode-1")
    fleet.add("decode-4")
    fleet.begin(1)
    ended, told_by = fleet.finish()
    check(ended, told_by, "decode-1")
    assert told_by["decode-4"]["arrived"]


@needs_etcd
@pytest.mark.slow
@pytest.mark.expects_warnings
def test_the_same_with_an_etcd_that_is_killed_and_started_again(
    open_fleet: Callable[..., Fleet], tmp_path: Path
) -> None:
    server = EtcdServer(tmp_path)
    server.start()
    try:
        fleet = open_fleet(server.endpoint)
        fleet.begin(0)
        fleet.until(REQUESTS // 8)
        server.kill()
        fleet.until(REQUESTS // 4)
        fleet.kill("decode-1")  # which stays in the last list
        fleet.until(REQUESTS // 3)
        server.start()
        fleet.add("decode-4")
        fleet.begin(1)
        ended, told_by = fleet.finish()
    finally:
        server.kill()
    check(ended, told_by, "decode-1")
