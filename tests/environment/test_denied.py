"""A kernel or a container that denies: reading another process, files, sockets with a path."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.confined_worker import skip_unless_root
from helpers.markers import LANES, Lane
from helpers.patterns import Geometry, Placement, Request
from helpers.processes import Pair, spawn_worker

from kvlink.errors import LaneUnavailable

REQUEST = Request(source_blocks=(6, 1, 4), target_blocks=(0, 7, 3), num_tokens=11)
FOREIGN = Lane(id="foreign", lane="", memory="numpy")
#: So long that `get` would be faster than `staged`.
LONG_RUNS = Geometry(layers=("layers.0",), heads=2, head_dim=1024)


@pytest.fixture
def confined() -> Iterator[Pair]:
    workers = [spawn_worker("helpers.confined_worker:ConfinedWorker") for _ in range(2)]
    yield Pair(*workers, FOREIGN)
    for worker in workers:
        assert worker.close() == 0, worker.stderr()


@pytest.mark.parametrize("how", ["seccomp", "no CAP_SYS_PTRACE"])
def test_where_reading_of_others_is_denied_staged_serves_foreign_memory(confined: Pair, how: str) -> None:
    if how == "seccomp":
        confined.target.call("deny_reading_of_others")
    else:
        skip_unless_root()
        confined.source.call("be_unreadable")
        confined.target.call("drop_ptrace")
    confined.open(LONG_RUNS)
    _, ticket = confined.offer(REQUEST, readers=3)
    for lane, why in (("vectored", "Operation not permitted"), ("get", "UCX would emulate it")):
        pulled = confined.target.call("pull", ticket, list(REQUEST.target_blocks), require=lane)
        with pytest.raises(LaneUnavailable, match=why):
            confined.target.call("wait", pulled)
    pulled = confined.target.call("pull", ticket, list(REQUEST.target_blocks))
    assert confined.target.call("wait", pulled).lane == "staged"
    confined.expect(REQUEST)
    confined.verify()
    (peer,) = confined.target.call("peers")
    assert peer["lanes"] == ["staged"]
    assert "opening vectored failed" in peer["lane_reason"]
    assert "UCX would emulate it" in peer["given_up"]


def test_where_reading_of_others_is_denied_a_push_of_foreign_memory_is_staged(confined: Pair) -> None:
    confined.target.call("deny_reading_of_others")
    confined.open()
    reserved, ticket = confined.target.call("reserve", list(REQUEST.target_blocks), REQUEST.num_tokens, ttl_s=20)
    pushed = confined.source.call("push", ticket, list(REQUEST.source_blocks))
    confined.source.call("tell", pushed, ("ready", {}), ("commit", {}))
    assert confined.target.call("wait", reserved).lane == "staged"
    confined.expect(REQUEST)
    confined.verify()


def test_pools_need_no_process_that_may_be_read(confined: Pair) -> None:
    confined.lane = LANES[0]
    confined.target.call("deny_reading_of_others")
    confined.open(source=Placement(memory="pool"))
    assert confined.hand_over(REQUEST).lane == "mapped"


@pytest.mark.parametrize("lane", [lane for lane in LANES if lane.id in ("mapped", "staged")], ids=lambda lane: lane.id)
def test_no_lane_needs_a_file_or_a_socket_with_a_path(confined: Pair, lane: Lane) -> None:
    skip_unless_root()
    confined.lane = lane
    for worker in (confined.source, confined.target):
        worker.call("make_files_read_only")
        assert not any(worker.call("can_write", folder) for folder in ("/tmp", "/var/tmp", "/run", "."))
    confined.open()
    assert confined.hand_over(REQUEST).lane == lane.lane


@pytest.mark.expects_warnings
def test_a_disk_that_is_full_of_logs_costs_lines_and_no_handoff(confined: Pair) -> None:
    skip_unless_root()
    for worker in (confined.source, confined.target):
        assert worker.call("log_to_a_full_disk") <= 10
    confined.lane = LANES[0]
    confined.open()
    assert confined.hand_over(REQUEST).lane == "mapped"
    assert "No space left on device" in confined.target.stderr()
    assert not any(confined.holds())
