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
BLOCKS = 24
#: The load has block 0.
GIVEN = list(range(1, 8))
TAKEN = list(range(8, 15))
#: By pushes.
FILLED = list(range(16, 23))
TOKENS = 4 * len(GIVEN)
#: What the allocators of C, Python and UCX may still take once they are warm.
RESIDENT_SLACK = 6 << 20
NOTICED_S = 3.0


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
        """A push and a pull, with nothing done before to make them work. The push comes first: it has to connect."""
        reserved, ticket = target.call("reserve", FILLED, TOKENS, require=self.lane.lane)
        pushed = source.call("push", ticket, GIVEN)
        source.call("tell", pushed, ("commit", {}))
        offered, ticket = source.call("offer", GIVEN, TOKENS)
        target.call("wait", reserved)
        pulled = target.call("pull", ticket, TAKEN, require=self.lane.lane)
        target.call("wait", pulled)
        for handle in (reserved, pulled):
            target.call("wait_released", handle)
        for handle in (pushed, offered):
            source.call("wait_released", handle)
        given = source.call("checksums", GIVEN)
        assert target.call("checksums", TAKEN + FILLED) == given + given

    def kill_victim(self) -> None:
        """End it in the middle of handoffs with both survivors, of either kind and in either direction."""
        _, its = self.victim.call("offer", GIVEN, TOKENS)
        offered, ours = self.source.call("offer", GIVEN, TOKENS, ttl_s=0.2)
        # One that names who pushes hears of its death, however far the push has come; nobody else would.
        reserved, its_to_fill = self.target.call("reserve", FILLED, TOKENS, sources=[self.victim.call("descriptor")])
        _, ours_to_fill = self.victim.call("reserve", FILLED, TOKENS, require=self.lane.lane)
        pushed = self.source.call("push", ours_to_fill, GIVEN)
        self.source.call("tell", pushed, ("commit", {}))
        its_push = self.victim.call("push", its_to_fill, GIVEN)
        self.victim.call("tell", its_push, ("ready", {"tokens": range(TOKENS // 2)}))
        self.victim.call("pull", ours, TAKEN, require=self.lane.lane)
        pulled = self.target.call("pull", its, TAKEN, require=self.lane.lane)
        self.victim.kill()
        for handle in (offered, pushed):
            self.source.call("wait_released", handle)
        for handle in (pulled, reserved):
            self.target.call("wait_released", handle, timeout_s=NOTICED_S)
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
