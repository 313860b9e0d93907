"""What stays behind after kill -9, and what grows when peers come and go."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from helpers.patterns import Geometry, Placement, Request
from helpers.processes import Pair, wait_until

from kvlink.testing import Worker

REQUEST = Request(source_blocks=(6, 1, 4), target_blocks=(0, 7, 3), num_tokens=11)


def named_shared_memory(pid: int) -> set[str]:
    """Files with a name of their own in shared memory that the process maps or has open."""
    mapped = re.findall(r"(/dev/shm/\S+)", Path(f"/proc/{pid}/maps").read_text())
    opened = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()]
    return {name for name in [*mapped, *opened] if name.startswith("/dev/shm/")}


def system_v_segments(pids: set[int]) -> list[str]:
    lines = Path("/proc/sysvipc/shm").read_text().splitlines()
    creator = lines[0].split().index("cpid")
    return [line for line in lines[1:] if int(line.split()[creator]) in pids]


def pools_mapped(pid: int) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:kvlink")


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def established(pid: int) -> int:
    """TCP connections of the process, of either family, that are not just listening."""
    sockets = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()}
    inodes = {name[8:-1] for name in sockets if name.startswith("socket:[")}
    count = 0
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{family}").read_text().splitlines()[1:]:
            fields = line.split()
            count += fields[9] in inodes and fields[3] != "0A"
    return count


def check_killed(pair: Pair, victim: Worker, survivor: Worker, before: tuple[int, int, int]) -> None:
    pids = {victim.pid, survivor.pid}
    names = named_shared_memory(victim.pid) | named_shared_memory(survivor.pid)
    victim.kill()

    def as_before() -> bool:
        now = (pools_mapped(survivor.pid), descriptors(survivor.pid), established(survivor.pid))
        return all(count <= start for count, start in zip(now, before, strict=True))

    wait_until(as_before, timeout_s=5, what="the survivor let go of the dead peer's memory and sockets")
    survivor.kill()
    assert not [name for name in names if Path(name).exists()]
    assert not system_v_segments(pids)


def test_killing_the_source_leaves_nothing_behind(own_pair: Pair) -> None:
    own_pair.open()
    pid = own_pair.target.pid
    before = (pools_mapped(pid), descriptors(pid), established(pid))
    own_pair.hand_over(REQUEST)
    check_killed(own_pair, own_pair.source, own_pair.target, before)


def test_killing_the_target_leaves_nothing_behind(own_pair: Pair) -> None:
    own_pair.open()
    pid = own_pair.source.pid
    before = (pools_mapped(pid), descriptors(pid), established(pid))
    own_pair.hand_over(REQUEST)
    check_killed(own_pair, own_pair.target, own_pair.source, before)


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
        what=f"12 reconnects leave {before}, not {(pools_mapped(pid), descriptors(pid))}",
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
