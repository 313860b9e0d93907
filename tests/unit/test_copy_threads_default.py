"""How many threads a node copies with when nobody says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvlink.transport import default_copy_threads


def host_with(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(16)))


@pytest.mark.usefixtures("sixteen_cores")
@pytest.mark.parametrize(
    ("files", "threads"),
    [
        ({}, 8),
        ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        ({"sys/fs/cgroup/cpu.max": "300000 100000\n"}, 3),
        ({"sys/fs/cgroup/cpu.max": "250000 100000\n"}, 3),
        ({"sys/fs/cgroup/cpu.max": "1000 100000\n"}, 1),
        ({"sys/fs/cgroup/cpu.max": "garbage"}, 8),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "500000 100000"}, 5),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/cpu.max": "500000 100000",
                "sys/fs/cgroup/a/cpu.max": "200000 100000",
            },
            2,
        ),
        ({"proc/self/cgroup": "0::/../outside\n", "sys/fs/cgroup/cpu.max": "400000 100000"}, 4),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 8),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 2),
    ],
)
def test_a_quota_lowers_the_number(tmp_path: Path, files: dict[str, str], threads: int) -> None:
    assert default_copy_threads(root=host_with(tmp_path, files)) == threads


def test_affinity_lowers_the_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {5})
    assert default_copy_threads(root=tmp_path) == 1


def test_this_host_gives_at_least_one() -> None:
    assert 1 <= default_copy_threads() <= len(os.sched_getaffinity(0))
