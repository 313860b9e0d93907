"""Systems next to kvlink in its benchmark: the socket for real, and peers by a driver that the test writes."""

import contextlib
import importlib.util
import os
import select
import shutil
import socket
import struct
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from helpers.source_text import ROOT

from kvlink import _native
from kvlink.bench.choice import choose_systems, parse_systems
from kvlink.bench.peers import PeerPlace, PeerSystem
from kvlink.bench.scattered import Geometry, Pool, pattern, permutation, run_offsets
from kvlink.bench.socket_system import SocketSystem
from kvlink.bench.systems import MemcpySystem, Setting, request_tables
from kvlink.bench.transfer import measure_systems
from kvlink.errors import DeadlineExceeded, InvalidArgument, PeerLost, ProtocolError, TransportFailed

GEOMETRY = Geometry(block_bytes=4096, total_bytes=256 * 1024)
SETTING = Setting(geometry=GEOMETRY, lane="auto", memory="kvlink", threads=1, repeat=2)
DRIVERS = ROOT / "benchmarks/peers"

# Moves blocks through a file, and goes wrong where FAKE_PEER says so.
FAKE_DRIVER = """
import os, socket, sys
import numpy as np

WRONG = os.environ.get("FAKE_PEER", "")

class Driver:
    op, lane, about = "write", "file", "a fake"

    def __init__(self, role, blocks):
        self.role, self.blocks = role, blocks
        if WRONG == "dies" and role == "target":
            print("out of luck", file=sys.stderr, flush=True)
            os._exit(3)
        self.listener = socket.create_server(("127.0.0.1", 0))

    def address(self):
        return self.listener.getsockname()[1]

    def connect(self, address):
        if self.role == "source":
            self.link = socket.create_connection(("127.0.0.1", address), timeout=30)
        else:
            self.link, _ = self.listener.accept()

    def prepare(self, source_offsets, target_offsets):
        size = np.uint64(self.blocks.block_bytes)
        self.rows = [(side // size).astype(int) for side in (source_offsets, target_offsets)]
        self.pool = self.blocks.bytes.reshape(-1, self.blocks.block_bytes)

    def send(self):
        if WRONG == "raises":
            raise RuntimeError("no way\\nat all")
        if WRONG == "babbles":
            os.write(int(sys.argv[2]), b"this is not JSON\\n")
        self.link.sendall(self.pool[self.rows[0]].tobytes())
        return 0.5

    def receive(self):
        if WRONG == "raises":
            return
        size = len(self.rows[1]) * self.blocks.block_bytes
        with self.link.makefile("rb", buffering=0) as file:
            data = bytearray()
            while len(data) < size:
                data += file.read(size - len(data))
        if WRONG == "flips":
            data[-1] ^= 1
        self.pool[self.rows[1]] = np.frombuffer(data, dtype=np.uint8).reshape(-1, self.blocks.block_bytes)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    drivers = tmp_path_factory.mktemp("peers")
    for name in ("serve.py", "blocks.py"):
        shutil.copy(DRIVERS / name, drivers)
    (drivers / "ucxx_driver.py").write_text(FAKE_DRIVER)
    (drivers / "ucx_driver.py").write_text("import a_library_that_nobody_has")
    return PeerPlace(python=Path(sys.executable), drivers=drivers)


def test_a_peer_and_the_socket_move_the_same_blocks_in_turn_with_memcpy(place):
    chosen, missing = choose_systems(["ucxx", "socket"], place)
    assert missing == []
    rows = {row["system"]: row for row in measure_systems(SETTING, chosen)}
    assert list(rows) == ["ucxx", "socket", "memcpy"]
    for name, row in rows.items():
        assert row["verified"] is True
        assert row["blocks"] == 64
        assert set(row["ratios"]) == set(rows) - {name}
        assert 0 < row["gbps_min"] <= row["gbps_median"] <= row["gbps_max"]
    assert (rows["ucxx"]["op"], rows["ucxx"]["lane"], rows["ucxx"]["lane_reason"]) == ("write", "file", "a fake")
    assert rows["ucxx"]["post_us_median"] == 500_000
    assert rows["socket"]["post_us_median"] is None
    assert rows["memcpy"]["ratio_to_memcpy"] == 1


def test_one_wrong_bit_of_a_peer_is_seen(place, monkeypatch):
    monkeypatch.setenv("FAKE_PEER", "flips")
    system = PeerSystem("ucxx", place, SETTING)
    try:
        assert system.move(request_tables(GEOMETRY, 1)).verified is False
    finally:
        system.close()


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ("dies", PeerLost, "the target of peer ucxx is lost: .*; it said: out of luck"),
        ("raises", TransportFailed, "the source of peer ucxx: RuntimeError: no way at all"),
        ("babbles", ProtocolError, "the source of peer ucxx answered b'this is not JSON', which is no JSON"),
    ],
)
def test_a_peer_that_fails_is_named(place, monkeypatch, wrong, error, says):
    monkeypatch.setenv("FAKE_PEER", wrong)
    with pytest.raises(error, match=says):
        measure_systems(SETTING, {"ucxx": partial(PeerSystem, "ucxx", place), "memcpy": MemcpySystem})


def test_peers_that_are_stopped_end_with_whoever_started_them(place, tmp_path):
    script = """
import os, sys
from pathlib import Path
from kvlink.bench.peers import PeerPlace, PeerSystem
from kvlink.bench.scattered import Geometry
from kvlink.bench.systems import Setting
setting = Setting(
    geometry=Geometry(block_bytes=4096, total_bytes=65536), lane="auto", memory="kvlink", threads=1, repeat=1
)
system = PeerSystem("ucxx", PeerPlace(python=Path(sys.executable), drivers=Path(sys.argv[1])), setting)
print(*(process._process.pid for process in system._processes), flush=True)
os.kill(os.getpid(), 9)
"""
    command = [sys.executable, "-c", script, str(place.drivers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            ended = os.pidfd_open(pid)  # if it is there still, its end is awaited
            try:
                assert select.select([ended], [], [], 30)[0]
            finally:
                os.close(ended)


@pytest.mark.parametrize("wrong", ["dies", "raises"])
def test_a_peer_that_fails_costs_the_others_nothing(place, monkeypatch, wrong):
    monkeypatch.setenv("FAKE_PEER", wrong)
    said = []
    starts = {"ucxx": partial(PeerSystem, "ucxx", place), "memcpy": MemcpySystem}
    rows = measure_systems(SETTING, starts, on_failure=lambda name, error: said.append((name, type(error))))
    assert [row["system"] for row in rows] == ["memcpy"]
    assert rows[0]["ratios"] == {}
    assert said == [("ucxx", {"dies": PeerLost, "raises": TransportFailed}[wrong])]


def test_a_peer_that_is_not_there_is_said_and_left_out(place, tmp_path):
    chosen, missing = choose_systems(["ucx", "memcpy"], place)
    assert list(chosen) == ["memcpy"]
    assert missing == [
        "ucx: not installed, run `make peers` (ModuleNotFoundError: No module named 'a_library_that_nobody_has')"
    ]
    chosen, missing = choose_systems(["nixl"], PeerPlace(python=tmp_path / "bin/python", drivers=DRIVERS))
    assert list(chosen) == ["memcpy"]
    assert missing == ["nixl: not installed, run `make peers` in a checkout of kvlink"]


def test_systems_are_named_once_and_known():
    assert parse_systems("kvlink, memcpy,kvlink") == ["kvlink", "memcpy"]
    with pytest.raises(InvalidArgument, match="peer 'pigeon' is none of kvlink, memcpy, socket, ucx"):
        parse_systems("kvlink,pigeon")


def test_peers_have_the_pattern_and_the_check_that_kvlink_has():
    spec = importlib.util.spec_from_file_location("peer_blocks", DRIVERS / "blocks.py")
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    source, target = (
        theirs.Blocks(block_bytes=4096, pool_blocks=GEOMETRY.pool_blocks, entries=GEOMETRY.entries, seed=5)
        for _ in range(2)
    )
    source.fill()
    own = Pool(GEOMETRY, memory="private")
    own.fill(seed=5)
    assert np.array_equal(source.bytes, own.bytes)
    assert np.array_equal(
        theirs.pattern(source.bytes[:64].view(np.uint64), 5), pattern(own.bytes[:64].view(np.uint64), 5)
    )
    tables = permutation(GEOMETRY, seed=1), permutation(GEOMETRY, seed=2)
    offsets = [run_offsets(GEOMETRY, table) for table in tables]
    assert all(np.array_equal(offset, source.offsets(table)) for offset, table in zip(offsets, tables, strict=True))
    target.forget()
    _native.memcpy_seconds(
        source=source.bytes,
        target=target.bytes,
        source_offsets=offsets[0],
        target_offsets=offsets[1],
        run_bytes=4096,
    )
    assert target.holds(*tables)
    for where in (int(offsets[1][5]) + 17, next(at for at in range(0, 4096 * 64, 4096) if at not in offsets[1])):
        target.bytes[where] ^= 1
        assert not target.holds(*tables)
        target.bytes[where] ^= 1


def test_the_socket_system_sees_the_end_of_its_source():
    system = SocketSystem(SETTING)
    try:
        assert system.move(request_tables(GEOMETRY, 1)).verified is True
        system._source.kill()
        with pytest.raises(PeerLost):
            _native.receive_runs(
                socket=system._link.fileno(),
                pool=np.zeros(64, dtype=np.uint8),
                offsets=np.zeros(1, dtype=np.uint64),
                run_bytes=64,
            )
    finally:
        system.close()


def test_runs_of_a_socket_stay_in_their_pool_and_within_its_timeout():
    pool = np.zeros(128, dtype=np.uint8)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 1000))
        offsets = np.array([0, 65], dtype=np.uint64)
        for move in (_native.send_runs, _native.receive_runs):
            with pytest.raises(InvalidArgument, match="the run of 64 bytes at offset 65 leaves the pool of 128 bytes"):
                move(socket=ours.fileno(), pool=pool, offsets=offsets, run_bytes=64)
        with pytest.raises(DeadlineExceeded, match="receive runs by a socket: nothing moved within"):
            _native.receive_runs(socket=ours.fileno(), pool=pool, offsets=offsets[:1], run_bytes=64)
