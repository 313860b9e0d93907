"""Awaitable methods, for programs without an asyncio loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from kvlink.errors import InvalidArgument

__all__ = ["run_blocking"]

_T = TypeVar("_T")


def run_blocking(work: Coroutine[Any, Any, _T]) -> _T:
    """Return what `work` does, in a loop of its own. Raises ``InvalidArgument`` inside a running loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    work.close()
    raise InvalidArgument("the blocking form would block the running asyncio loop: await the other one")
