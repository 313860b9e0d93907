"""How long tests take that have a short form, for every run, and a long one, for `make soak`."""

from __future__ import annotations

import os

SEED = int(os.environ.get("KVLINK_PROPERTY_SEED", "20"))
SOAKING = os.environ.get("KVLINK_SOAK", "") == "1"


def rounds(short: int, long: int) -> int:
    """Return `long` with ``KVLINK_SOAK=1`` in the environment, else `short`."""
    return long if SOAKING else short
