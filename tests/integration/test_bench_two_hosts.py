"""`kvlink bench transfer --serve` and `--connect`, with both ends on this host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.source_text import ROOT

import kvlink
from kvlink.bench.command import transfer
from kvlink.bench.scattered import Geometry
from kvlink.bench.systems import MemcpySystem, Setting
from kvlink.bench.transfer import measure_systems
from kvlink.bench.two_hosts import BenchServer, connect_to, read_secret
from kvlink.errors import (
    AuthenticationFailed,
    ConfigError,
    InvalidArgument,
    KvlinkError,
    NotReady,
    PeerUnreachable,
)

GEOMETRY = Geometry(block_bytes=4096, total_bytes=256 * 1024)
SETTING = Setting(geometry=GEOMETRY, lane="staged", memory="kvlink", threads=1, repeat=2)


@pytest.fixture
def server():
    server = BenchServer("127.0.0.1:0", secret="of both", advertise=None)
    yield server
    server.close()


def test_one_process_serves_until_interrupted_and_another_pulls_and_verifies(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("of both\n")
    command = [
        sys.executable,
        "-c",
        "from kvlink.cli import main; main()",
        "bench",
        "transfer",
        "--serve",
        "127.0.0.1:0",
    ]
    serving = subprocess.Popen(
        [*command, "--secret-file", str(tmp_path / "secret")], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    try:
        said = serving.stderr.readline().split()
        assert said[:4] == ["kvlink", "bench:", "serving", "at"]
        for lane in ("mapped", "staged"):
            setting = Setting(geometry=GEOMETRY, lane=lane, memory="kvlink", threads=1, repeat=2)
            row, _ = measure_systems(setting, {"kvlink": connect_to(said[4], secret="of both"), "memcpy": MemcpySystem})
            assert (row["system"], row["lane"], row["verified"]) == ("kvlink", lane, True)
            assert row["cpu_s_per_gb_source"] > 0
        serving.send_signal(signal.SIGINT)
        assert serving.wait(timeout=30) == 0, serving.stderr.read()
    finally:
        serving.kill()
        serving.wait(timeout=30)
        serving.stderr.close()


@pytest.mark.expects_warnings
def test_a_wrong_secret_and_a_wrong_port_are_told_apart(server: BenchServer) -> None:
    with pytest.raises(AuthenticationFailed, match="do not share a secret"):
        measure_systems(SETTING, {"kvlink": connect_to(server.address, secret="of one"), "memcpy": MemcpySystem})
    with pytest.raises(PeerUnreachable, match="Connection refused"):
        measure_systems(SETTING, {"kvlink": connect_to("127.0.0.1:1", secret="of both"), "memcpy": MemcpySystem})


def test_what_the_server_cannot_do_is_told_to_whoever_asks(server: BenchServer) -> None:
    system = connect_to(server.address, secret="of both")(SETTING)
    try:
        source = system._source
        for request, error, says in (
            ({"do": "open", "version": "0.0.1"}, InvalidArgument, "the other 0.0.1"),
            ({"do": "finish"}, NotReady, "start again"),
            ({"undo": "offer"}, InvalidArgument, "asks what is not understood"),
            (
                {"do": "open", "version": kvlink.__version__, "block_bytes": 4096, "total_bytes": 1 << 40},
                InvalidArgument,
                "at most",
            ),
        ):
            with pytest.raises(error, match=says):
                source.ask(request)
    finally:
        system.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"connect": "nowhere"}, "--connect: 'nowhere' is not host:port"),
        ({"connect": "127.0.0.1:1", "peers": "kvlink,socket"}, "--connect measures kvlink and memcpy only"),
        ({"serve": "127.0.0.1"}, "--serve: '127.0.0.1' is not host:port"),
        ({"serve": "0.0.0.0:0"}, "there is no secret"),
        (
            {"serve": "127.0.0.1:0", "secret_file": "/no/such/file"},
            "--secret-file: /no/such/file cannot be read: No such",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, str], says: str
) -> None:
    monkeypatch.delenv("KVLINK_SECRET", raising=False)
    with pytest.raises(KvlinkError) as caught:
        transfer(**options)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_secret_comes_from_the_file_else_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLINK_SECRET", "of the environment")
    (tmp_path / "secret").write_text(" of the file\n")
    (tmp_path / "empty").write_text("\n")
    assert read_secret(str(tmp_path / "secret")) == "of the file"
    assert read_secret("") == "of the environment"
    with pytest.raises(ConfigError, match="is empty"):
        read_secret(str(tmp_path / "empty"))
    del os.environ["KVLINK_SECRET"]
    assert read_secret("") is None
