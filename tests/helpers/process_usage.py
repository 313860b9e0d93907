"""What the calling process has of the operating system."""

from __future__ import annotations

import ctypes
import gc
import re
from collections import Counter
from pathlib import Path


def usage() -> dict[str, int]:
    """Descriptors, mappings, threads and resident bytes of this process, its own garbage collected.

    Mappings are those that have a name: files, memory of other nodes, shared memory of UCX. Anonymous ones come
    and go as the C library likes: of threads that have ended it keeps some stacks and all arenas, four mappings
    for the first two handshakes that overlap, and the kernel joins and splits neighbours. What would be lost
    among them is counted as a thread, or as resident.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "mappings": sum(_is_named(line) for line in Path("/proc/self/maps").read_text().splitlines()),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "resident": pages * 4096,
    }


def mapped_names() -> Counter[str]:
    """How many mappings each name has, its numbers left out: what to look at where there are more than there were."""
    named = (line for line in Path("/proc/self/maps").read_text().splitlines() if _is_named(line))
    return Counter(re.sub(r"[0-9a-f]*\d[0-9a-f]*", "#", line.split(maxsplit=5)[5]) for line in named)


def _is_named(line: str) -> bool:
    """Whether a line of /proc/self/maps is of something with a name, and not of the heap or a stack."""
    fields = line.split(maxsplit=5)
    return len(fields) == 6 and not fields[5].startswith("[")
