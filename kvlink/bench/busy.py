"""A process that keeps one core busy, to show what a machine that has other work does to waiting."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["busy_core"]

_REAP_TIMEOUT_S = 30.0
# It ends by itself when its parent is gone, since nobody else would end it.
_SPIN = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(100_000):
        pass
"""


@contextmanager
def busy_core(wanted: bool) -> Iterator[None]:
    """Keep a core busy within the block, if that is `wanted`."""
    if not wanted:
        yield
        return
    spinning = subprocess.Popen([sys.executable, "-c", _SPIN], stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        spinning.kill()
        spinning.wait(timeout=_REAP_TIMEOUT_S)
