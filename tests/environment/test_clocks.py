"""Leases and deadlines run on each host's own monotonic clock: the wall clock may jump, and another host's differ."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest
from helpers.confined_worker import skip_unless_root
from helpers.markers import LANES
from helpers.patterns import Request
from helpers.processes import Pair, spawn_worker

from kvlink.errors import TicketExpired
from kvlink.testing import Worker

REQUEST = Request(source_blocks=(6, 1, 4), target_blocks=(0, 7, 3), num_tokens=11)
DAY_S = 24 * 3600
WALL_CLOCK = """
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
#include <atomic>
static std::atomic<long> moved{0};
extern "C" void kvlink_move_wall_clock(long seconds) { moved += seconds; }
extern "C" int clock_gettime(clockid_t clock, struct timespec* now) {
  using Ask = int (*)(clockid_t, struct timespec*);
  static const auto ask = reinterpret_cast<Ask>(dlsym(RTLD_NEXT, "clock_gettime"));
  const int done = ask(clock, now);
  if (done == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += moved;
  return done;
}
extern "C" int gettimeofday(struct timeval* now, void*) {
  struct timespec precise;
  const int done = clock_gettime(CLOCK_REALTIME, &precise);
  now->tv_sec = precise.tv_sec;
  now->tv_usec = precise.tv_nsec / 1000;
  return done;
}
extern "C" time_t time(time_t* also) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (also != nullptr) *also = now.tv_sec;
  return now.tv_sec;
}
"""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Worker, Worker]]:
    """Source and target, both with a wall clock that can be moved."""
    folder = tmp_path_factory.mktemp("wall-clock")
    (folder / "wall_clock.cpp").write_text(WALL_CLOCK)
    library = folder / "wall_clock.so"
    command = ["g++", "-O1", "-shared", "-fPIC", "-w", str(folder / "wall_clock.cpp"), "-ldl", "-o", str(library)]
    before = os.environ.get("LD_PRELOAD", "")  # what a sanitizer needs must stay first, and is nothing for a compiler
    subprocess.run(command, check=True, timeout=60, env={**os.environ, "LD_PRELOAD": ""})
    env = {"LD_PRELOAD": f"{before} {library}".strip()}
    workers = tuple(spawn_worker("helpers.confined_worker:ConfinedWorker", env) for _ in range(2))
    yield workers
    for worker in workers:
        assert worker.close() == 0, worker.stderr()


@pytest.mark.parametrize("seconds", [10 * DAY_S, -10 * DAY_S], ids=["forth", "back"])
def test_a_wall_clock_that_jumps_ends_no_lease_and_prolongs_none(nodes: tuple[Worker, Worker], seconds: int) -> None:
    source, target = nodes
    pair = Pair(source, target, LANES[0])
    pair.open()
    _, first = pair.offer(REQUEST, ttl_s=20)
    short, second = pair.offer(REQUEST, ttl_s=0.5)
    target.call("inject_faults", delay_ms=100)
    pulled = pair.pull(first, REQUEST, deadline_s=20)
    for worker in nodes:  # while the bytes move, or shortly before or after
        assert abs(worker.call("move_wall_clock", seconds) - seconds) < DAY_S
    target.call("wait", pulled)
    pair.expect(REQUEST)
    pair.verify()

    with pytest.raises(TicketExpired):  # by its own half second, not by the days
        source.call("wait", short, timeout_s=5)
    with pytest.raises(TicketExpired):
        target.call("wait", pair.pull(second, REQUEST, deadline_s=5))
    assert not any(pair.holds())
    pair.shut()


def test_a_host_whose_clock_began_at_another_time_is_a_peer_like_any_other() -> None:
    skip_unless_root()
    with (
        spawn_worker("helpers.confined_worker:ConfinedWorker") as source,
        spawn_worker("helpers.confined_worker:ConfinedWorker") as target,
    ):
        try:
            later = source.call("shift_clock", 100 * DAY_S)
        except AssertionError as error:
            if "timens_offsets" in str(error) or "unshare" in str(error):
                pytest.skip(f"no time namespaces: {error}")
            raise
        assert later > 100 * DAY_S
        pair = Pair(source, target, LANES[0])
        pair.open()
        offered, ticket = pair.offer(REQUEST, ttl_s=20)
        pulled = pair.pull(ticket, REQUEST, deadline_s=10)
        target.call("wait", pulled)
        pair.expect(REQUEST)
        pair.verify()
        source.call("wait", offered)
