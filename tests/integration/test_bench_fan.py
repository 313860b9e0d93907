"""`kvlink bench fanout` and `kvlink bench incast`, as a user runs them, at sizes that take a moment."""

from __future__ import annotations

import pytest
from integration.test_bench_handoff import kvlink_command, rows_of

ROW_KEYS = [
    *("system", "shape", "lane", "peers", "block_bytes", "total_bytes", "threads", "repeat", "gbps"),
    *("gbps_one_to_one", "ratio_to_one_to_one", "slowest_to_mean", "verified"),
]
SMALL = ("--peers", "2", "--total-bytes", "64KiB", "--block-bytes", "4KiB", "--repeat", "1")


@pytest.mark.parametrize(("shape", "lane"), [("fanout", "mapped"), ("incast", "staged")])
def test_many_at_once_are_measured_next_to_one_and_verified(shape: str, lane: str) -> None:
    (row,) = rows_of(shape, *SMALL, "--lane", lane)
    assert list(row) == ROW_KEYS
    assert (row["shape"], row["lane"], row["peers"], row["total_bytes"]) == (shape, lane, 2, 64 << 10)
    assert row["verified"] is True
    assert row["gbps"] > 0
    assert row["ratio_to_one_to_one"] == pytest.approx(row["gbps"] / row["gbps_one_to_one"])
    assert 0 < row["slowest_to_mean"] <= 1


def test_a_share_without_a_block_is_refused() -> None:
    done = kvlink_command("incast", "--peers", "64", "--total-bytes", "64KiB", "--block-bytes", "4KiB")
    assert done.returncode == 1
    assert "give each one of a multiple of 256 bytes" in done.stderr
