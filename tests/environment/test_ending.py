"""SIGTERM in the middle of a handoff, and forks: peers are let go, nothing is left, and a child starts anew."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from helpers.leftovers import named_shared_memory, system_v_segments
from helpers.patterns import Placement, Request
from helpers.processes import Pair, spawn_worker, wait_until

from kvlink.errors import Closed, PeerLost, TransportFailed

REQUEST = Request(source_blocks=(6, 1, 4), target_blocks=(0, 7, 3), num_tokens=11)
NOTICED_S = 3.0
ENDED_WITH = 143
#: They are the interpreter's business.
PYTHON_THREADS = ("kvlink-accept", "kvlink-handshake")


@pytest.mark.parametrize("handled", [False, True], ids=["not-handled", "handled"])
def test_sigterm_in_the_middle_releases_the_peer_and_leaves_nothing(own_pair: Pair, handled: bool) -> None:
    """Not handled, it is a death like any other; handled by an exit, the node closes on the way out and says so."""
    with spawn_worker("helpers.confined_worker:ConfinedWorker", own_pair.lane.env) as source:
        own_pair.source = source
        own_pair.open()
        if handled:
            source.call("close_at_sigterm", code=ENDED_WITH)
        own_pair.target.call("inject_faults", delay_ms=60_000)
        _, ticket = own_pair.offer(REQUEST)
        pulled = own_pair.pull(ticket, REQUEST, deadline_s=60)
        own_pair.target.call("watch_moving", pulled)
        pids = {source.pid, own_pair.target.pid}
        names = named_shared_memory(source.pid)

        os.kill(source.pid, signal.SIGTERM)
        assert source.join(timeout_s=10) == (ENDED_WITH if handled else -signal.SIGTERM)
        began = time.monotonic()
        with pytest.raises((Closed, TransportFailed) if handled else (PeerLost, TransportFailed)):
            own_pair.target.call("wait", pulled)
        own_pair.target.call("wait_released", pulled)
        assert time.monotonic() - began < NOTICED_S
        assert not any(own_pair.target.call("holds").values())
        assert not source.stderr()
        own_pair.target.call("shut")
        assert not [name for name in names if os.path.exists(name)]
        wait_until(lambda: not system_v_segments(pids), timeout_s=5, what="segments of System V are left")


def test_threads_leave_signals_to_the_application_but_not_faults_of_their_own(opened: Pair) -> None:
    """Blocked, a fault would end the process past faulthandler."""
    threads = {}
    for task in Path(f"/proc/{opened.source.pid}/task").iterdir():
        if (name := (task / "comm").read_text().strip()).startswith("kvlink-") and name not in PYTHON_THREADS:
            status = (task / "status").read_text()
            threads[name] = int(status.partition("SigBlk:")[2].split()[0], 16)
    assert {"kvlink-progress", "kvlink-copy"} <= threads.keys()
    for name, blocked in threads.items():
        for sent in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGALRM):
            assert blocked >> (sent - 1) & 1, (name, sent)
        for fault in (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT):
            assert not blocked >> (fault - 1) & 1, (name, fault)


def test_a_forked_child_makes_nodes_of_its_own(opened: Pair) -> None:
    """In the user's process UCX has run before the fork; what the parent has goes on meanwhile."""
    with spawn_worker("helpers.confined_worker:ConfinedWorker") as worker:
        pair = Pair(worker, opened.target, opened.lane)
        worker.call("open", opened.geometry, Placement(memory=opened.lane.memory), seed=5, name="parent")
        assert worker.call("hand_over_in_a_child") == "moved"
        _, ticket = pair.offer(REQUEST)
        opened.target.call("wait", pair.pull(ticket, REQUEST))
        assert worker.close() == 0, worker.stderr()
