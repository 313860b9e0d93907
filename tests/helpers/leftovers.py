"""What a process has open, and what it has in shared memory that could outlive it."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

__all__ = ["named_shared_memory", "open_files", "system_v_segments"]


def open_files(pid: int) -> list[str]:
    """What each descriptor of the process is, as the kernel names it; without those that are closed meanwhile."""
    names = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            names.append(os.readlink(entry))
    return names


def named_shared_memory(pid: int) -> set[str]:
    """Files with a name of their own in shared memory that the process maps or has open."""
    mapped = re.findall(r"(/dev/shm/\S+)", Path(f"/proc/{pid}/maps").read_text())
    return {name for name in [*mapped, *open_files(pid)] if name.startswith("/dev/shm/")}


def system_v_segments(pids: set[int]) -> list[str]:
    """Segments that these processes have made and that are there still, as the kernel lists them."""
    lines = Path("/proc/sysvipc/shm").read_text().splitlines()
    creator = lines[0].split().index("cpid")
    return [line for line in lines[1:] if int(line.split()[creator]) in pids]
