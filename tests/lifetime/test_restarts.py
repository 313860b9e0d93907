"""Workers that are killed and come back at the same address, again and again, while others work."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator

import pytest
from helpers.markers import LANES, STAGED_ANY, Lane, skip_unless_served
from helpers.patterns import Geometry, Placement
from helpers.processes import spawn_worker, wait_until
from helpers.soak import rounds

from kvlink.testing import Worker

#: First the one on which a peer that is killed could leave most behind.
KILLED = (STAGED_ANY, *LANES)
KILLS = rounds(5, 20)
WARMED_UP = 2
BLOCKS = 16
#: The load has block 0.
GIVEN = list(range(1, 8))
TAKEN = list(range(8, 15))
#: What the allocators of C, Python and UCX may still take once they are warm.
RESIDENT_SLACK = 6 << 20


@pytest.fixture
def start() -> Iterator[Callable[..., Worker]]:
    """Start a process that runs a node under load; whatever is left is killed and reaped."""
    with contextlib.ExitStack() as stack:

        def spawn(lane: Lane, **options: object) -> Worker:
            worker = stack.enter_context(spawn_worker("helpers.loaded_worker:LoadedWorker", lane.env))
            placement = Placement(num_blocks=BLOCKS, memory=lane.memory)
            worker.call("open", Geometry(head_dim=4096), placement, seed=1, **options)
            return worker

        yield spawn


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


class Town:
    """A source and a target that survive, and a victim which both of them have handoffs with."""

    def __init__(self, lane: Lane, start: Callable[..., Worker]) -> None:
        self.lane, self._start = lane, start
        self._listen = f"127.0.0.1:{free_port()}"
        self.source = start(lane, name="source")
        self.target = start(lane, name="target")
        self.victim = self.start_victim()

    def start_victim(self) -> Worker:
        return self._start(self.lane, name="victim", listen=self._listen)

    def hand_over(self, source: Worker, target: Worker) -> None:
        """One handoff, with nothing done before it to make it work."""
        offered, ticket = source.call("offer", GIVEN, 4 * len(GIVEN))
        pulled = target.call("pull", ticket, TAKEN, require=self.lane.lane)
        target.call("wait", pulled)
        target.call("wait_released", pulled)
        source.call("wait_released", offered)
        assert source.call("checksums", GIVEN) == target.call("checksums", TAKEN)

    def kill_victim(self) -> None:
        """End it in the middle of handoffs with both survivors."""
        _, its = self.victim.call("offer", GIVEN, 4 * len(GIVEN))
        offered, ours = self.source.call("offer", GIVEN, 4 * len(GIVEN), ttl_s=0.2)
        self.victim.call("pull", ours, TAKEN, require=self.lane.lane)
        pulled = self.target.call("pull", its, TAKEN, require=self.lane.lane)
        self.victim.kill()
        self.source.call("wait_released", offered)
        self.target.call("wait_released", pulled)
        for survivor in (self.source, self.target):
            survivor.call("forget_handles")

    def usage(self) -> dict[str, int]:
        return {
            f"{name} {what}": count
            for name, worker in (("source", self.source), ("target", self.target))
            for what, count in worker.call("usage").items()
        }


@pytest.mark.slow
@pytest.mark.parametrize("lane", KILLED[: rounds(1, len(KILLED))], ids=lambda lane: lane.id)
def test_a_worker_killed_and_restarted_at_its_address_disturbs_nobody(lane: Lane, start: Callable[..., Worker]) -> None:
    skip_unless_served(lane)
    town = Town(lane, start)
    _, ticket = town.source.call("offer", [0], 4, ttl_s=600, readers=1 << 16)
    town.target.call("start_load", ticket, 0, require=lane.lane)
    before: dict[str, int] = {}
    for kill in range(KILLS):
        town.hand_over(town.victim, town.target)
        town.hand_over(town.source, town.victim)
        if kill == WARMED_UP:
            before = town.usage()
        town.kill_victim()
        town.victim = town.start_victim()
    town.hand_over(town.victim, town.target)
    town.hand_over(town.source, town.victim)
    slack = {what: RESIDENT_SLACK if what.endswith("resident") else 0 for what in before}
    wait_until(
        lambda: all(count <= before[what] + slack[what] for what, count in town.usage().items()),
        timeout_s=5,
        what=lambda: f"{before} after {KILLS - WARMED_UP} more kills is {town.usage()}",
    )
    pulled, error = town.target.call("stop_load")
    assert not error
    assert pulled > KILLS
