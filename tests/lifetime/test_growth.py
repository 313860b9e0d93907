"""What grows with connections, registrations and nodes that come and go: nothing. And many nodes at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers.markers import LANES, Lane, skip_unless_served
from helpers.patterns import Geometry, Placement
from helpers.processes import spawn_worker
from helpers.soak import rounds

from kvlink.testing import Worker

CONNECTS_PER_LANE = rounds(100, 2500) // len(LANES)
WARM_CONNECTS = 10
REGISTRATIONS = rounds(500, 10_000)
REGIONS_PER_NODE = 50
#: What the allocators of C, Python and UCX may still take once they are warm: a leaked endpoint is tens of KiB.
RESIDENT_SLACK = 3 << 20
PROCESSES = 4
NODES_PER_PROCESS = 8


@pytest.fixture(scope="module")
def workers() -> Callable[..., Worker]:
    """Processes by environment and role, for the whole file: what is left by one test shows in the next."""
    started: dict[tuple[str, str], Worker] = {}

    def get(role: str, env: dict[str, str] | None = None) -> Worker:
        key = (role, str(env or {}))
        if key not in started:
            started[key] = spawn_worker("helpers.loaded_worker:LoadedWorker", env)
        return started[key]

    yield get
    for worker in started.values():
        assert worker.close() == 0, worker.stderr()


def assert_flat(before: dict[str, int], after: dict[str, int]) -> None:
    """Nothing has grown; what has shrunk since was left over from earlier."""
    slack = {"resident": RESIDENT_SLACK}
    assert all(after[what] <= before[what] + slack.get(what, 0) for what in before), (before, after)


@pytest.mark.parametrize("lane", LANES, ids=lambda lane: lane.id)
@pytest.mark.slow
def test_connecting_again_and_again_leaves_nothing(lane: Lane, workers: Callable[..., Worker]) -> None:
    skip_unless_served(lane)
    source, target = (workers(role, lane.env) for role in ("source", "target"))
    for role, worker in (("source", source), ("target", target)):
        worker.call("open", Geometry(), Placement(memory=lane.memory), seed=1, name=role)
    _, ticket = source.call("offer", [0], 4, ttl_s=600, readers=1 << 16)  # goes on without its handle

    def connect(times: int) -> None:
        """Some of them are made because the source has something to push."""
        pushes = times // 5
        pulls = times - pushes
        assert target.call("reconnect", ticket, 0, "source", times=pulls, require=lane.lane, timeout_s=100) == pulls
        for _ in range(pushes):
            source.call("drop_peer", "target")
            reserved, its = target.call("reserve", [1], 4, require=lane.lane)
            pushed = source.call("push_timed", its, [2])
            target.call("wait_released", reserved)
            assert source.call("wait_released", pushed).error is None
        source.call("forget_handles")
        target.call("forget_handles")

    connect(WARM_CONNECTS)
    before = [worker.call("usage") for worker in (source, target)]
    connect(CONNECTS_PER_LANE)
    for was, worker in zip(before, (source, target), strict=True):
        assert_flat(was, worker.call("usage_once_not_above", was))
    for worker in (source, target):
        worker.call("shut")


@pytest.mark.slow
def test_a_reader_by_get_writes_nothing_into_shared_memory_of_its_source(workers: Callable[..., Worker]) -> None:
    """So one that is killed at any moment leaves no queue of the source half written."""
    lane = next(lane for lane in LANES if lane.id == "get")
    skip_unless_served(lane)
    source, target = workers("source"), workers("target")
    for role, worker in (("source", source), ("target", target)):
        worker.call("open", Geometry(), Placement(memory=lane.memory), seed=1, name=role)
    _, ticket = source.call("offer", [0], 4, ttl_s=600, readers=1 << 16)
    before = source.call("ucx_shared_memory")
    assert before
    target.call("reconnect", ticket, 0, "source", times=3, require=lane.lane)
    assert source.call("ucx_shared_memory") == before
    for worker in (source, target):
        worker.call("shut")


@pytest.mark.slow
def test_registering_again_and_again_leaves_nothing(workers: Callable[..., Worker]) -> None:
    worker = workers("source")
    worker.call("register_again_and_again", nodes=3, regions=REGIONS_PER_NODE)
    before = worker.call("usage")
    nodes = REGISTRATIONS // REGIONS_PER_NODE
    worker.call("register_again_and_again", nodes=nodes, regions=REGIONS_PER_NODE, timeout_s=200)
    assert_flat(before, worker.call("usage_once_not_above", before))


def test_32_nodes_of_one_host_start_at_once_and_all_are_reached(workers: Callable[..., Worker]) -> None:
    crew = [workers(role) for role in ("source", "target", "third", "fourth")]
    assert len(crew) == PROCESSES
    for number, worker in enumerate(crew):
        worker.start("open_many", NODES_PER_PROCESS, first=number * NODES_PER_PROCESS)
    tickets = [worker.result() for worker in crew]
    # Each node reads from one of the next process, so each is reached, and from another process.
    for number, worker in enumerate(crew):
        worker.start("pull_many", tickets[(number + 1) % PROCESSES])
    for number, worker in enumerate(crew):
        first = (number + 1) % PROCESSES * NODES_PER_PROCESS
        assert worker.result() == list(range(first, first + NODES_PER_PROCESS))
    for worker in crew:
        worker.start("close_many")
    for worker in crew:
        worker.result()
