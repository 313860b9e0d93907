"""`kvlink bench transfer` and `kvlink doctor`, as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.source_text import ROOT

import kvlink

ROW_KEYS = [
    *("system", "lane", "lane_reason", "op", "memory", "threads", "block_bytes", "blocks"),
    *("gbps_median", "gbps_min", "gbps_max", "post_us_median", "cpu_s_per_gb_source", "cpu_s_per_gb_target"),
    *("memcpy_gbps", "ratio_to_memcpy", "ratios", "verified"),
]
SMALL = ("--block-bytes", "4KiB,64KiB", "--total-bytes", "4MiB", "--repeat", "2")


def kvlink_command(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from kvlink.cli import main; main()", *arguments],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def report_of(*arguments: str, **env: str) -> dict[str, Any]:
    done = kvlink_command(*arguments, "--json", "-", **env)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert sorted(report) == ["command", "kvlink", "machine", "rows"]
    assert report["kvlink"] == kvlink.__version__
    return report


@pytest.mark.parametrize(
    ("lane", "memory", "env"),
    [
        ("mapped", "kvlink", {}),
        ("vectored", "foreign", {}),
        ("get", "foreign", {}),
        ("staged", "foreign", {}),
        ("staged", "kvlink", {"UCX_TLS": "tcp"}),
    ],
    ids=["mapped", "vectored", "get", "staged", "staged over tcp"],
)
def test_the_benchmark_verifies_what_it_moved_on_each_lane(lane, memory, env):
    rows = report_of("bench", "transfer", *SMALL, "--lane", lane, "--memory", memory, **env)["rows"]
    assert [(row["block_bytes"], row["blocks"]) for row in rows] == [(4096, 1024), (65536, 64)]
    for row in rows:
        assert list(row) == ROW_KEYS
        named = (row["system"], row["op"], row["lane"], row["memory"], row["threads"])
        assert named == ("kvlink", "pull", lane, memory, 1)
        assert f"from {'pools' if memory == 'kvlink' else 'foreign memory'} on this host" in row["lane_reason"]
        assert row["verified"] is True
        assert 0 < row["gbps_min"] <= row["gbps_median"] <= row["gbps_max"]
        assert row["ratio_to_memcpy"] > 0
        assert row["memcpy_gbps"] > 0


def test_the_benchmark_prints_a_table_for_people(tmp_path):
    wanted = ("--json", str(tmp_path / "rows.json"), "--report", str(tmp_path / "page.html"))
    done = kvlink_command("bench", "transfer", *SMALL, *wanted, COLUMNS="200")
    assert done.returncode == 0, done.stderr
    assert "Bandwidth over block size" in (tmp_path / "page.html").read_text()
    assert "64KiB" in done.stdout
    assert "mapped" in done.stdout
    assert len(json.loads((tmp_path / "rows.json").read_text())["rows"]) == 2


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--lane", "mapped", "--memory", "foreign"), "LaneUnavailable"),
        (("--lane", "pigeon"), "InvalidArgument"),
        (("--block-bytes", "64KB"), "InvalidArgument"),
        (("--memory", "borrowed"), "InvalidArgument"),
        (("--json", "/no/such/folder/rows.json"), "ConfigError"),
        (("--report", "/no/such/folder/page.html"), "ConfigError"),
    ],
)
def test_what_cannot_be_measured_is_one_line_and_exit_code_1(arguments, error):
    done = kvlink_command("bench", "transfer", *SMALL, *arguments)
    assert done.returncode == 1
    assert done.stderr.startswith(f"kvlink: {error}: ")
    assert done.stderr.count("\n") == 1


def test_the_doctor_tries_every_lane():
    rows = {row["check"]: row for row in report_of("doctor")["rows"]}
    assert rows["UCX"]["ok"] is True
    assert [lane for lane in ("mapped", "vectored", "get", "staged") if rows[f"lane {lane}"]["ok"]]


def test_the_doctor_says_why_ucx_is_missing(tmp_path):
    done = kvlink_command("doctor", KVLINK_UCX=str(tmp_path))
    assert done.returncode == 1
    assert "UcxUnavailable" in done.stdout


def oldest_ucx() -> Path:
    """The UCX whose headers kvlink is built against; `make install` keeps the library beside them."""
    named = os.environ.get("KVLINK_UCX_INCLUDE")
    return Path(named).parent if named else ROOT / ".venv/ucx-oldest/libucx"


@pytest.mark.skipif(not (oldest_ucx() / "lib").is_dir(), reason="`make install` has not put the oldest UCX there")
@pytest.mark.parametrize("env", [{}, {"UCX_TLS": "tcp"}], ids=["one host", "tcp"])
def test_one_build_runs_on_the_oldest_supported_ucx_too(env):
    rows = {row["check"]: row for row in report_of("doctor", KVLINK_UCX=str(oldest_ucx()), **env)["rows"]}
    assert rows["UCX"]["detail"].startswith("1.14.1")
    for lane in ("mapped", "vectored", "staged") if env else ("mapped", "vectored", "get", "staged"):
        assert rows[f"lane {lane}"]["ok"], rows[f"lane {lane}"]["detail"]
