"""Pools seen from outside: by another process, by a peer that means harm, and by the registry of pools."""

from __future__ import annotations

import gc
import mmap
import os
import subprocess
import sys

import numpy as np

import kvlink
from kvlink import errors, memory

READ_AND_TRY_TO_WRITE = """
import mmap, os, sys
fd, size = int(sys.argv[1]), int(sys.argv[2])
shared = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
assert shared[:3] == b"abc", shared[:3]

def refused(attempt):
    try:
        attempt()
    except (OSError, ValueError):
        return
    raise SystemExit("a peer could write")

writable = mmap.PROT_READ | mmap.PROT_WRITE
refused(lambda: mmap.mmap(fd, size, mmap.MAP_SHARED, writable))
refused(lambda: mmap.mmap(os.open(f"/proc/self/fd/{fd}", os.O_RDWR), size, mmap.MAP_SHARED, writable))
refused(lambda: os.pwrite(os.open(f"/proc/self/fd/{fd}", os.O_RDWR), b"x", 0))
refused(lambda: os.pwrite(fd, b"x", 0))
refused(lambda: os.truncate(fd, 0))
private = mmap.mmap(fd, size, mmap.MAP_PRIVATE, writable)
private[:3] = b"xyz"
assert shared[:3] == b"abc"
"""


def pool_at(address: int) -> memory.SharedPool:
    pool = memory.pool_of(address)
    assert pool is not None
    return pool


def test_another_process_reads_a_pool_and_can_write_it_in_no_way():
    buffer = kvlink.empty(10_000, "uint8")
    memoryview(buffer)[:3] = b"abc"
    fd = pool_at(buffer.address).open_read_only()
    try:
        command = [sys.executable, "-c", READ_AND_TRY_TO_WRITE, str(fd), str(buffer.nbytes)]
        done = subprocess.run(command, pass_fds=[fd], capture_output=True, text=True, timeout=60, check=False)
    finally:
        os.close(fd)
    assert done.returncode == 0, done.stderr
    assert bytes(memoryview(buffer)[:3]) == b"abc"


def test_the_owner_keeps_writing_what_the_descriptor_shows():
    buffer = kvlink.empty(4096, "uint8")
    fd = pool_at(buffer.address).open_read_only()
    shared = mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ)
    os.close(fd)
    buffer.numpy()[:] = 9
    assert set(shared[:]) == {9}
    del buffer
    gc.collect()
    assert set(shared[:]) == {9}  # a mapping outlives its owner


def test_a_descriptor_is_not_inherited_by_children():
    buffer = kvlink.empty(1, "uint8")
    fd = pool_at(buffer.address).open_read_only()
    try:
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)


def test_every_address_of_a_pool_finds_the_whole_of_it():
    first, second = kvlink.empty(8192, "uint8"), kvlink.empty((3, 100), "float32")
    for buffer in (first, second):
        for offset in (0, 1, buffer.nbytes - 1):
            pool = pool_at(buffer.address + offset)
            assert (pool.address, pool.nbytes) == (buffer.address, buffer.nbytes)
    foreign = np.zeros(100)
    assert memory.pool_of(foreign.ctypes.data) is None
    assert memory.pool_of(0) is None
    assert memory.pool_of(2**64 - 1) is None


def test_a_dropped_buffer_leaves_no_descriptor():
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    buffers = [kvlink.empty(1, "uint8") for _ in range(20)]
    assert descriptors() == before + 20
    del buffers
    gc.collect()
    assert descriptors() == before


def test_without_descriptors_the_error_says_so():
    script = """
import resource, kvlink
from kvlink import memory
buffer = kvlink.empty(1, "uint8")
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
for attempt in (lambda: kvlink.empty(1, "uint8"), memory.pool_of(buffer.address).open_read_only):
    try:
        attempt()
    except kvlink.errors.OutOfMemory as error:
        print(error)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # sanitizers look at the process when it ends
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Too many open files") == 2
    assert "ulimit -n" in done.stdout


def test_bytes_copied_are_counted_as_a_number():
    assert memory.copied_bytes() >= 0


def test_a_process_that_is_killed_leaves_nothing_in_shared_memory():
    script = (
        "import kvlink, time; b = kvlink.empty(1 << 20, 'uint8'); b.numpy()[:] = 1; print(flush=True); time.sleep(60)"
    )
    before = set(os.listdir("/dev/shm"))
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.kill()
    process.wait(timeout=20)
    process.stdout.close()
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "kvlink" in name]


def test_errors_are_the_documented_leaves():
    assert issubclass(errors.OutOfMemory, MemoryError)
    assert issubclass(errors.NoGpu, errors.KvlinkError)
