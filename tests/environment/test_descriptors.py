"""The limit on open files: typed errors, nothing leaked, and work again once there are free ones."""

from __future__ import annotations

import pytest
from helpers.markers import LANES
from helpers.patterns import Request
from helpers.processes import Pair, spawn_worker

from kvlink.errors import DeadlineExceeded, OutOfMemory, PeerLost, PeerUnreachable

REQUEST = Request(source_blocks=(6, 1, 4), target_blocks=(0, 7, 3), num_tokens=11)
#: A node has about 25, most of them UCX's.
ENOUGH = 48


def test_a_node_starts_or_says_that_descriptors_ran_out_wherever_they_do() -> None:
    with spawn_worker("helpers.confined_worker:ConfinedWorker") as worker:
        worker.call("open_at_most", None)
        *said, leaked = worker.call("nodes_by_free_descriptors", ENOUGH)
        assert worker.close() == 0, worker.stderr()
    assert leaked == "0 leaked"
    assert said[0] != "works"
    assert said[-1] == "works"
    refused = [one for one in said if one != "works"]
    assert all(one.startswith("OutOfMemory: ") for one in refused), refused
    assert all("open files" in one or "ulimit -n" in one for one in refused), refused


@pytest.mark.expects_warnings
@pytest.mark.parametrize("short", ["source", "target"])
def test_a_pull_at_the_limit_fails_typed_and_the_next_one_works(short: str) -> None:
    with (
        spawn_worker("helpers.confined_worker:ConfinedWorker") as source,
        spawn_worker("helpers.confined_worker:ConfinedWorker") as target,
    ):
        pair = Pair(source, target, LANES[0])
        pair.open()
        worker = source if short == "source" else target
        _, ticket = pair.offer(REQUEST, ttl_s=60)
        worker.call("open_at_most", 0)
        pulled = pair.pull(ticket, REQUEST, deadline_s=1)
        with pytest.raises((OutOfMemory, PeerUnreachable, PeerLost, DeadlineExceeded)):
            target.call("wait", pulled)
        target.call("wait_released", pulled)
        worker.call("open_at_most", None)
        assert pair.hand_over(REQUEST).lane == "mapped"
        assert worker.call("holds")["exclusive"] == 0
