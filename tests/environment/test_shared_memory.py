"""Without /dev/shm, without System V's segments, with little locked memory: which lanes are left, and what is said."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers.confined_worker import skip_unless_root
from helpers.markers import LANES, Lane, skip_unless_served
from helpers.patterns import Geometry, Placement, Request
from helpers.processes import Pair, spawn_worker

from kvlink.errors import OutOfMemory
from kvlink.testing import Worker

ON_ONE_HOST = [lane for lane in LANES if not lane.env]
REQUEST = Request(source_blocks=(6, 1, 4), target_blocks=(0, 7, 3), num_tokens=11)
MEMLOCK_BYTES = 64 << 10


@pytest.fixture(scope="module")
def confined() -> Callable[[str, int | None], tuple[Worker, Worker]]:
    """Source and target that have confined themselves in one way, for all tests that ask for it."""
    skip_unless_root()
    pairs: dict[str, tuple[Worker, Worker]] = {}

    def get(way: str, argument: int | None) -> tuple[Worker, Worker]:
        if way not in pairs:
            pairs[way] = (spawn_confined(), spawn_confined())
            for worker in pairs[way]:
                worker.call(way, *([] if argument is None else [argument]))
        return pairs[way]

    yield get
    for pair in pairs.values():
        for worker in pair:
            assert worker.close() == 0, worker.stderr()


def spawn_confined(env: dict[str, str] | None = None) -> Worker:
    return spawn_worker("helpers.confined_worker:ConfinedWorker", env)


@pytest.mark.parametrize("lane", ON_ONE_HOST, ids=lambda lane: lane.id)
@pytest.mark.parametrize(
    ("way", "argument"),
    [("fill_shared_memory", None), ("hide_shared_memory", None), ("lock_at_most", MEMLOCK_BYTES)],
    ids=["dev-shm-full", "no-dev-shm", "memlock-64-KiB"],
)
def test_every_lane_of_one_host_works(
    lane: Lane, way: str, argument: int | None, confined: Callable[[str, int | None], tuple[Worker, Worker]]
) -> None:
    """Pools are memfds, which need no file system; UCX takes System V's segments where it has no /dev/shm."""
    skip_unless_served(lane)
    pair = Pair(*confined(way, argument), lane)
    pair.open()
    assert pair.hand_over(REQUEST).lane == lane.lane
    if lane.lane == "get":
        (peer,) = pair.target.call("peers")
        assert ("posix" in peer["transports"]) == (way == "lock_at_most")
    pair.shut()


def test_the_limit_on_locked_memory_holds_in_the_test_above(
    confined: Callable[[str, int | None], tuple[Worker, Worker]],
) -> None:
    worker, _ = confined("lock_at_most", MEMLOCK_BYTES)
    assert worker.call("locks", MEMLOCK_BYTES // 2)
    assert not worker.call("locks", 2 * MEMLOCK_BYTES)


def test_with_no_shared_memory_of_any_kind_a_node_says_so_and_tcp_serves() -> None:
    skip_unless_root()
    with spawn_confined() as worker:
        worker.call("fill_shared_memory")
        worker.call("forbid_system_v")
        with pytest.raises(OutOfMemory, match="is /dev/shm full"):
            worker.call("open", Geometry(), Placement(memory="pool"), seed=1)
    with spawn_confined({"UCX_TLS": "tcp"}) as worker:
        worker.call("fill_shared_memory")
        worker.call("forbid_system_v")
        worker.call("open", Geometry(), Placement(memory="pool"), seed=1)
        assert worker.close() == 0
