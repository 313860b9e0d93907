"""`kvlink bench layout` and `kvlink bench plan`, as a user runs them, and what their verification would find."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from helpers.soak import rounds
from helpers.source_text import ROOT

from kvlink.bench.ranks import LAYERS, PAIRS, RankPool, Request
from kvlink.bench.runs import RunReference
from kvlink.errors import InvalidArgument

LAYOUT_ROW_KEYS = [
    *("system", "pair", "lane", "lane_reason", "threads", "sources", "run_bytes", "runs", "moved_bytes"),
    *("gbps_median", "gbps_min", "gbps_max", "memcpy_gbps", "ratio_to_memcpy", "ratio_min", "ratio_max"),
    *("against", "ratio_to_against", "ratio_to_against_min", "ratio_to_against_max", "verified"),
]
RUN_BYTES = {
    "same": 32768,
    "tp2-tp4": 512,
    "tp4-tp2": 512,
    "block16-block64": 32768,
    "block64-block16": 32768,
    "hnd-nhd": 256,
    "same-64KiB": 65536,
}


def kvlink_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from kvlink.cli import main; main()", *arguments],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def rows_of(*arguments: str) -> list[dict[str, Any]]:
    done = kvlink_command(*arguments, "--json", "-")
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    return rows


def test_pairs_of_layouts_are_measured_and_verified():
    """Every second one in the short form."""
    chosen = list(RUN_BYTES)[:: rounds(2, 1)]
    rows = rows_of("bench", "layout", "--total-bytes", "2MiB", "--repeat", "1", "--pair", ",".join(chosen))
    assert set(PAIRS) == set(RUN_BYTES)
    assert {row["pair"]: row["run_bytes"] for row in rows} == {pair: RUN_BYTES[pair] for pair in chosen}
    for row in rows:
        assert list(row) == LAYOUT_ROW_KEYS
        assert (row["lane"], row["verified"], row["moved_bytes"]) == ("mapped", True, 2 << 20)
        assert row["lane_reason"].startswith("mapped from pools on this host")
        assert row["runs"] * row["run_bytes"] == row["moved_bytes"]
        assert 0 < row["ratio_min"] <= row["ratio_to_memcpy"] <= row["ratio_max"]
        assert 0 < row["gbps_min"] <= row["gbps_median"] <= row["gbps_max"]
        assert row["memcpy_gbps"] > 0
        assert (row["against"], row["ratio_to_against"]) == ("", None)
    assert next(row["sources"] for row in rows if row["pair"] == "tp4-tp2") == 2


def test_a_pair_is_measured_beside_another():
    [row] = rows_of(
        *("bench", "layout", "--pair", "tp2-tp4", "--against", "same-64KiB", "--lane", "staged"),
        *("--total-bytes", "2MiB", "--repeat", "3"),
    )
    assert (row["pair"], row["against"], row["lane"], row["verified"]) == ("tp2-tp4", "same-64KiB", "staged", True)
    assert 0 < row["ratio_to_against_min"] <= row["ratio_to_against"] <= row["ratio_to_against_max"]


def test_layouts_print_a_table_for_people():
    measured = ("bench", "layout", "--pair", "tp2-tp4", "--total-bytes", "512KiB", "--repeat", "1")
    for further, heading in (((), "runs"), (("--against", "same"), "to beside")):
        done = kvlink_command(*measured, *further)
        assert done.returncode == 0, done.stderr
        assert "tp2-tp4" in done.stdout
        assert "ratio" in done.stdout
        assert heading in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [("layout", "--pair", "tp3-tp5"), ("layout", "--against", "tp3-tp5"), ("plan", "--size", "4096")],
    ids=["unknown pair", "against an unknown pair", "one number"],
)
def test_what_cannot_be_measured_is_one_line_and_exit_code_1(arguments):
    done = kvlink_command("bench", *arguments)
    assert done.returncode == 1
    assert done.stderr.startswith("kvlink: InvalidArgument: ")
    assert done.stderr.count("\n") == 1


def test_plans_are_timed_to_the_last_post(tmp_path):
    report = tmp_path / "rows.json"
    done = kvlink_command("bench", "plan", "--size", "16x4,8x64", "--repeat", "3", "--json", str(report))
    assert done.returncode == 0, done.stderr
    assert "regions" in done.stdout
    rows = json.loads(report.read_text())["rows"]
    assert [(row["blocks"], row["regions"], row["runs"]) for row in rows] == [(16, 4, 64), (8, 64, 512)]
    for row in rows:
        assert 0 < row["copies"] <= row["runs"]
        us = [row[f"request_to_last_post_us_{which}"] for which in ("min", "median", "max")]
        assert 0 < us[0] <= us[1] <= us[2]


@pytest.mark.parametrize("pair", PAIRS)
def test_the_memcpy_copies_what_the_handoff_would(pair):
    """Its runs, carried out on the real pools, leave what the verification wants; one wrong byte is noticed."""
    request = Request.of(PAIRS[pair], total_bytes=1 << 20)
    sources = [RankPool(rank, request) for rank in request.pair.sources]
    target = RankPool(request.pair.target, request)
    for source in sources:
        source.fill(seed=3)
    tables = request.table(request.pair.sources[0], seed=1), request.table(request.pair.target, seed=2)
    layouts = [source.cache().layout for source in sources]
    runs = RunReference(sources=layouts, target=target.cache().layout).runs(*tables, num_tokens=request.num_tokens)
    assert len(runs.source_offsets) * runs.run_bytes == request.moved_bytes
    given = np.concatenate([source.bytes for source in sources])
    for from_source, to_target in zip(runs.source_offsets, runs.target_offsets, strict=True):
        target.bytes[int(to_target) :][: runs.run_bytes] = given[int(from_source) :][: runs.run_bytes]

    def verified() -> bool:
        return target.holds(request=request, source_table=tables[0], target_table=tables[1], seed=3)

    assert verified()
    target.bytes[int(runs.target_offsets[-1]) + runs.run_bytes - 1] ^= 1
    assert not verified()
    target.bytes[int(runs.target_offsets[-1]) + runs.run_bytes - 1] ^= 1
    rank = request.pair.target
    untouched = np.setdiff1d(np.arange(request.pool_blocks(rank)), tables[1])
    component_block_bytes = rank.block_tokens * rank.token_bytes // (LAYERS * 2)
    target.bytes[int(untouched[0]) * component_block_bytes] ^= 1
    assert not verified()


def test_a_request_has_whole_blocks_on_both_sides():
    request = Request.of(PAIRS["block16-block64"], total_bytes=(3 << 20) - 1)
    assert request.num_tokens == 128
    with pytest.raises(InvalidArgument, match="of one block"):
        Request.of(PAIRS["block16-block64"], total_bytes=1000)
