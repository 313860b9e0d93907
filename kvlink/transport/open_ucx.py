"""Opening UCX for one node."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from kvlink.errors import UcxUnavailable
from kvlink.transport.devices import rdma_devices
from kvlink.transport.find_ucx import find_ucx
from kvlink.transport.settings import settings_for

if TYPE_CHECKING:
    from kvlink._native import UcxContext

__all__ = ["open_ucx"]

_log = logging.getLogger("kvlink")
_warned: set[str] = set()


def open_ucx(*, listen_host: str) -> UcxContext | None:
    """Load UCX if it is not yet, and open a context for a node that listens on `listen_host`.

    Returns None, after one warning, when ``KVLINK_UCX`` leaves the choice to kvlink and there is no
    UCX: a node can do without it on one host. Takes some 20 ms, and holds no lock meanwhile.

    Raises
    ------
    UcxUnavailable
        If the UCX that was asked for cannot be used, or its settings are refused.
    ConfigError
        If the user's ``UCX_`` variables contradict each other.
    """
    from kvlink import _native

    try:
        choice = find_ucx()
    except UcxUnavailable as error:
        if os.environ.get("KVLINK_UCX", "").strip() not in ("", "auto"):
            raise
        _warn_once(f"{error}; until then only the lanes of one host are there")
        return None
    for warning in choice.warnings:
        _warn_once(warning)
    wanted = settings_for(listen_host=listen_host, rdma=choice.can_use_rdma and bool(rdma_devices()))
    context = _native.UcxContext(
        library_path=str(choice.path), settings=list(wanted.settings), one_sided=wanted.one_sided
    )
    _log.debug("UCX %s from %s: %s", context.version, context.library_path, choice.reason)
    return context


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        _log.warning(message)
