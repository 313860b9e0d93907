"""What stays behind after kill -9, and what grows when peers come and go."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

from helpers.leftovers import named_shared_memory, open_files, system_v_segments
from helpers.patterns import Geometry, Placement, Request
from helpers.processes import Pair, wait_until

from kvlink.testing import Worker

REQUEST = Request(source_blocks=(6, 1, 4), target_blocks=(0, 7, 3), num_tokens=11)


def pools_mapped(pid: int) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:kvlink")


def descriptors(pid: int) -> int:
    return len(open_files(pid))


def established(pid: int) -> int:
    """TCP connections of the process, of either family, that are not just listening."""
    inodes = {name[8:-1] for name in open_files(pid) if name.startswith("socket:[")}
    count = 0
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{family}").read_text().splitlines()[1:]:
            fields = line.split()
            count += fields[9] in inodes and fields[3] != "0A"
    return count


def open_things(pid: int) -> dict[str, int]:
    return {"pools": pools_mapped(pid), "descriptors": descriptors(pid), "connections": established(pid)}


def open_things_once_up(worker: Worker) -> dict[str, int]:
    """Count when the node's threads have opened all that they keep: once a stranger was turned away."""
    host, _, port = worker.call("address").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as stranger:
        stranger.sendall(b"\xff\xff\xff\xff")
        while stranger.recv(4096):
            pass
    return open_things(worker.pid)


def check_killed(victim: Worker, survivor: Worker, before: dict[str, int]) -> None:
    pids = {victim.pid, survivor.pid}
    names = named_shared_memory(victim.pid) | named_shared_memory(survivor.pid)
    victim.kill()

    def as_before() -> bool:
        now = open_things(survivor.pid)
        return all(now[what] <= before[what] for what in before)

    wait_until(
        as_before,
        timeout_s=5,
        what=lambda: f"{before} is {open_things(survivor.pid)} again: {sorted(open_files(survivor.pid))}",
    )
    survivor.kill()
    assert not [name for name in names if Path(name).exists()]
    assert not system_v_segments(pids)


def test_killing_the_source_leaves_nothing_behind(own_pair: Pair) -> None:
    own_pair.open()
    before = open_things_once_up(own_pair.target)
    own_pair.hand_over(REQUEST)
    check_killed(own_pair.source, own_pair.target, before)


def test_killing_the_target_leaves_nothing_behind(own_pair: Pair) -> None:
    own_pair.open()
    before = open_things_once_up(own_pair.source)
    own_pair.hand_over(REQUEST)
    check_killed(own_pair.target, own_pair.source, before)


def test_a_peer_that_comes_back_again_and_again_leaves_no_descriptor_or_mapping(pair: Pair) -> None:
    pair.open()
    placement = pair.expected_source.placement

    def reconnect() -> None:
        pair.source.call("open", Geometry(), placement, seed=2)
        pair.hand_over(REQUEST)

    for _ in range(3):
        reconnect()
    pid = pair.target.pid
    before = (pools_mapped(pid), descriptors(pid))
    for _ in range(12):
        reconnect()
    wait_until(
        lambda: pools_mapped(pid) <= before[0] and descriptors(pid) <= before[1],
        timeout_s=5,
        what=lambda: f"12 reconnects leave {before}, not {open_things(pid)}: {sorted(open_files(pid))}",
    )


def test_nodes_opened_and_closed_leave_no_thread_and_no_descriptor(spawn: Callable[..., Worker]) -> None:
    worker = spawn()

    def threads_and_descriptors() -> tuple[int, int]:
        worker.call("shut")
        return len(list(Path(f"/proc/{worker.pid}/task").iterdir())), descriptors(worker.pid)

    for _ in range(3):
        worker.call("open", Geometry(), Placement(), seed=1)
    before = threads_and_descriptors()
    for _ in range(20):
        worker.call("open", Geometry(), Placement(), seed=1)
    assert threads_and_descriptors() == before
