"""A worker process that takes something away from itself before it makes its node: files, memory, rights, time."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
import resource
import signal
import stat
import struct
import sys
import time
from pathlib import Path
from types import FrameType

import pytest

import kvlink
from helpers.node_worker import NodeWorker
from helpers.patterns import Geometry, Placement
from helpers.system_calls import BIND, NEW_IPC, NEW_NAMESPACE, NEW_TIME, READ_ONLY, REMOUNT, check, libc, mount, unshare

__all__ = ["ConfinedWorker", "skip_unless_root"]

CAP_IPC_LOCK, CAP_SYS_PTRACE = 14, 19
_PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 4, 22, 38
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION_3 = 0x20080522
#: By machine: process_vm_readv.
_READ_OF_OTHERS = {"x86_64": 310, "aarch64": 270}
_PAGE = 4096


def skip_unless_root() -> None:
    """Skip where a process may neither mount anything nor give up what it has."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to make namespaces")
    child = os.fork()
    if child == 0:  # so that this process stays where it is
        try:
            unshare(NEW_NAMESPACE | NEW_IPC)
        except OSError:
            os._exit(1)
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0:
        pytest.skip("this machine forbids mount namespaces")


class ConfinedWorker(NodeWorker):
    """Each method that confines is called before `open`, and lasts as long as the process."""

    def fill_shared_memory(self) -> None:
        """See a /dev/shm of one page, which is taken."""
        unshare(NEW_NAMESPACE)
        mount("none", "/dev/shm", kind="tmpfs", options=f"size={_PAGE}")
        Path("/dev/shm/full").write_bytes(b"x" * _PAGE)

    def hide_shared_memory(self) -> None:
        """See a /dev without /dev/shm."""
        unshare(NEW_NAMESPACE)
        mount("none", "/dev", kind="tmpfs")
        for name, minor in (("null", 3), ("zero", 5), ("random", 8), ("urandom", 9)):
            os.mknod(f"/dev/{name}", 0o666 | stat.S_IFCHR, os.makedev(1, minor))

    def forbid_system_v(self) -> None:
        """Have no segment of System V's shared memory."""
        unshare(NEW_IPC)
        Path("/proc/sys/kernel/shmmni").write_text("0")

    def make_files_read_only(self) -> None:
        """Have no place for a file, or for a socket that has one."""
        unshare(NEW_NAMESPACE)
        places = {line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()}
        for place in sorted(places - {"/proc", "/dev/shm"}):  # the latter UCX demands, where it is
            if not place.startswith("/proc/"):
                mount("none", place, flags=BIND | REMOUNT | READ_ONLY)

    def can_write(self, folder: str) -> bool:
        """Whether a file can be made there."""
        try:
            with open(f"{folder}/kvlink-{os.getpid()}", "x") as made:
                os.unlink(made.name)
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.ENOENT):
                raise
            return False
        return True

    def lock_at_most(self, size_bytes: int) -> None:
        """Have this limit on locked memory, and no right to pass over it."""
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (size_bytes, size_bytes))
        _drop_capability(CAP_IPC_LOCK)

    def locks(self, size_bytes: int) -> bool:
        """Whether so much memory can be locked."""
        memory = ctypes.create_string_buffer(size_bytes)
        locked = libc().mlock(memory, ctypes.c_size_t(size_bytes)) == 0
        libc().munlock(memory, ctypes.c_size_t(size_bytes))
        return locked

    def open_at_most(self, more: int | None) -> None:
        """Have so many free descriptors, or as many as ever."""
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard if more is None else _first_unused_descriptor() + more, hard))

    def nodes_by_free_descriptors(self, most: int) -> list[str]:
        """Try to make a node with 0, 1, 2 ... free descriptors; returns what came of it, and how many leaked."""
        before = _open_descriptors()
        said = []
        for free in range(most):
            self.open_at_most(free)
            try:
                self.open(Geometry(), Placement(memory="numpy"), seed=1)
            except kvlink.KvlinkError as error:
                said.append(f"{type(error).__name__}: {error}")
            except Exception as error:  # noqa: BLE001 - whatever it was is the answer
                said.append(f"not typed: {error!r}")
            else:
                said.append("works")
            self.open_at_most(None)
            self.shut()
        leaked = _open_descriptors() - before
        return [*said, f"{leaked} leaked"]

    def deny_reading_of_others(self) -> None:
        """Have process_vm_readv denied, as a container's seccomp profile does."""
        number = _READ_OF_OTHERS.get(platform.machine())
        if number is None:
            raise RuntimeError(f"no number of process_vm_readv for {platform.machine()}")
        steps = [
            (0x20, 0, 0, 0),
            (0x15, 0, 1, number),
            (0x06, 0, 0, 0x00050000 | errno.EPERM),
            (0x06, 0, 0, 0x7FFF0000),
        ]
        program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
        header = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(program)))
        check(libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
        check(libc().prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0), "install a filter")

    def drop_ptrace(self) -> None:
        """Give up the right to read whom this process may not trace."""
        _drop_capability(CAP_SYS_PTRACE)

    def be_unreadable(self) -> None:
        """Let nobody without that right read this process."""
        check(libc().prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "be unreadable")

    def shift_clock(self, seconds: int) -> float:
        """Count time from another moment, as another host does; returns what the clock says now."""
        unshare(NEW_TIME)
        Path("/proc/self/timens_offsets").write_text(f"monotonic {seconds} 0\nboottime {seconds} 0\n")
        with open("/proc/self/ns/time_for_children") as namespace:
            check(libc().setns(namespace.fileno(), NEW_TIME), "setns")
        return time.clock_gettime(time.CLOCK_MONOTONIC)

    def move_wall_clock(self, seconds: int) -> float:
        """Have the wall clock jump, where `wall_clock.cpp` is loaded; returns how far it has jumped."""
        before = time.time()
        ctypes.CDLL(None).kvlink_move_wall_clock(ctypes.c_long(seconds))
        return time.time() - before

    def log_to_a_full_disk(self) -> int:
        """Log everything to a file that cannot grow; returns the logger's level."""
        unshare(NEW_NAMESPACE)
        mount("none", "/mnt", kind="tmpfs", options=f"size={_PAGE}")
        Path("/mnt/full").write_bytes(b"x" * _PAGE)
        logging.basicConfig(filename="/mnt/kvlink.log", level=logging.DEBUG, force=True)
        return logging.getLogger("kvlink").getEffectiveLevel()

    def close_at_sigterm(self, *, code: int) -> None:
        """End by SystemExit when SIGTERM comes, as a server does that tidies up."""

        def leave(signum: int, frame: FrameType | None) -> None:
            sys.exit(code)

        signal.signal(signal.SIGTERM, leave)

    def hand_over_in_a_child(self, *, timeout_s: float = 20.0) -> str:
        """Fork, and hand a block over between two nodes that the child makes; returns what came of it."""
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write_end, _hand_over_alone().encode())
            os._exit(0)
        os.close(write_end)
        with os.fdopen(read_end, "rb") as pipe:
            signal.alarm(int(timeout_s))
            said = pipe.read().decode()
            signal.alarm(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return said if code == 0 else f"{said}, exit code {code}"


def _hand_over_alone() -> str:
    workers = NodeWorker(), NodeWorker()
    try:
        for seed, worker in enumerate(workers):
            worker.open(Geometry(), Placement(memory="pool"), seed=seed, name=f"child-{seed}")
        source, target = workers
        _, ticket = source.offer([3], 4)
        target.wait(target.pull(ticket, [5], deadline_s=10))
        same = source.checksums([3]) == target.checksums([5])
        for worker in workers:
            worker.shut()
    except Exception as error:  # noqa: BLE001 - whatever it was is the answer
        return f"{type(error).__name__}: {error}"
    return "moved" if same else "wrong bytes"


def _drop_capability(number: int) -> None:
    header = ctypes.create_string_buffer(struct.pack("Ii", _CAPABILITY_VERSION_3, 0))
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable, twice 32 bits
    check(libc().capget(header, sets), "capget")
    for index in (0, 1, 2):
        sets[index] &= ~(1 << number)
    check(libc().capset(header, sets), "capset")


def _open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _first_unused_descriptor() -> int:
    taken = set(map(int, os.listdir("/proc/self/fd")))
    return next(number for number in range(len(taken) + 1) if number not in taken)
