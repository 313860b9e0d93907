"""`kvlink bench handoff` and `kvlink bench idle`, as a user runs them, at sizes that take a moment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.source_text import ROOT

HANDOFF_ROW_KEYS = [
    *("system", "lane", "blocks", "block_bytes", "concurrent", "handoffs", "threads", "busy", "p50_us", "p99_us"),
    *("max_us", "percentiles_us", "gbps", "gbps_one_large", "ratio_to_one_large", "verified"),
]
IDLE_ROW_KEYS = [
    *("system", "lane", "role", "peers", "processes", "seconds", "cpu_percent", "rss_bytes_per_peer"),
    *("descriptors_per_peer", "threads"),
]
SMALL = ("--blocks", "1,3", "--block-bytes", "4KiB", "--concurrent", "1,5", "--handoffs", "4", "--repeat", "2")


def kvlink_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from kvlink.cli import main; main()", "bench", *arguments],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def rows_of(*arguments: str) -> list[dict[str, Any]]:
    done = kvlink_command(*arguments, "--json", "-")
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    return rows


@pytest.mark.parametrize(("lane", "busy"), [("mapped", "--no-busy"), ("staged", "--busy")])
def test_handoffs_are_timed_and_verified_one_by_one_and_at_once(lane: str, busy: str) -> None:
    rows = rows_of("handoff", *SMALL, "--lane", lane, busy)
    assert [(row["blocks"], row["concurrent"], row["handoffs"]) for row in rows] == [
        *((1, 1, 4), (1, 5, 10), (3, 1, 4), (3, 5, 10)),
    ]
    for row in rows:
        assert list(row) == HANDOFF_ROW_KEYS
        assert (row["system"], row["lane"], row["block_bytes"], row["threads"]) == ("kvlink", lane, 4096, 1)
        assert row["verified"] is True
        assert row["busy"] is (busy == "--busy")
        assert 0 < row["p50_us"] <= row["p99_us"] <= row["max_us"]
        assert (row["percentiles_us"][50], row["percentiles_us"][100]) == (row["p50_us"], row["max_us"])
        assert row["gbps"] > 0
        assert row["ratio_to_one_large"] == 1 if row["concurrent"] == 1 else row["ratio_to_one_large"] > 0


def test_an_idle_node_is_measured_in_both_roles() -> None:
    rows = rows_of("idle", "--peers", "6", "--seconds", "0.2")
    assert [(row["role"], row["peers"], row["processes"]) for row in rows] == [("target", 6, 4), ("source", 6, 4)]
    for row in rows:
        assert list(row) == IDLE_ROW_KEYS
        assert (row["system"], row["lane"]) == ("kvlink", "auto")
        assert row["seconds"] >= 0.2
        assert row["cpu_percent"] >= 0
        assert 0 < row["descriptors_per_peer"] < 8
        assert row["threads"] < 12


def test_a_table_is_printed_for_people(tmp_path: Path) -> None:
    report = tmp_path / "rows.json"
    done = kvlink_command("idle", "--peers", "1", "--seconds", "0.1", "--json", str(report))
    assert done.returncode == 0, done.stderr
    assert "RSS" in done.stdout
    assert json.loads(report.read_text())["rows"]


@pytest.mark.parametrize(
    "arguments",
    [("handoff", "--blocks", "1,0"), ("handoff", "--block-bytes", "1000"), ("handoff", "--lane", "pigeon")],
    ids=["no blocks", "no whole block", "unknown lane"],
)
def test_what_cannot_be_measured_is_one_line_and_exit_code_1(arguments: tuple[str, ...]) -> None:
    done = kvlink_command(*arguments)
    assert done.returncode == 1
    assert done.stderr.startswith("kvlink: InvalidArgument: ")
    assert done.stderr.count("\n") == 1
