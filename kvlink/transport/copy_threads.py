"""How many threads a node copies with, when the user does not say."""

from __future__ import annotations

import math
import os
from pathlib import Path

__all__ = ["default_copy_threads"]

_MOST = 8  # a host's memory is saturated by fewer; more would only take cores from the engine


def default_copy_threads(*, root: Path = Path("/")) -> int:
    """Return the number of cores that this process may use, by affinity and by cgroup, at most 8.

    `root` stands in for the file system's root, for tests.
    """
    cores = len(os.sched_getaffinity(0))
    quota = _cgroup_cores(root)
    return max(1, min(cores, _MOST, cores if quota is None else math.ceil(quota)))


def _cgroup_cores(root: Path) -> float | None:
    """Return the least CPU quota of this process's control groups, in cores; None without one."""
    quotas = [_quota_v1(root / "sys/fs/cgroup/cpu")]
    mount = root / "sys/fs/cgroup"
    folder = mount / _own_cgroup(root).lstrip("/")
    while True:  # every ancestor's limit counts
        quotas.append(_quota_v2(folder))
        if folder == mount or mount not in folder.parents:
            break
        folder = folder.parent
    known = [quota for quota in quotas if quota is not None]
    return min(known, default=None)


def _own_cgroup(root: Path) -> str:
    for line in _read(root / "proc/self/cgroup").splitlines():
        if line.startswith("0::"):
            return line[3:]
    return ""


def _quota_v2(folder: Path) -> float | None:
    quota, _, period = _read(folder / "cpu.max").partition(" ")
    return _ratio(quota, period)


def _quota_v1(folder: Path) -> float | None:
    return _ratio(_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us"))


def _ratio(quota: str, period: str) -> float | None:
    try:
        cores = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None  # "max", or no such file
    return cores if cores > 0 else None  # version 1 writes -1 for no limit


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""
