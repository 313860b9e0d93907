"""How kvlink configures UCX, and what it makes of the variables that the user has set."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from kvlink.errors import ConfigError
from kvlink.transport.devices import interface_of

__all__ = ["UcxSettings", "settings_for"]

_TX_SEGMENT = "256k"
_RX_SEGMENT = "1m"
_UNITS = {"": 1, "B": 1, "K": 1 << 10, "KB": 1 << 10, "M": 1 << 20, "MB": 1 << 20, "G": 1 << 30, "GB": 1 << 30}


@dataclass(frozen=True, slots=True, kw_only=True)
class UcxSettings:
    """What a context is opened with.

    Attributes
    ----------
    settings
        UCX's names without ``UCX_``, and values.
    one_sided
        Whether peers may read memory. UCX over TCP checks no keys, so off wherever TCP is among the
        transports. Writing cannot be switched off there: UCX's TCP port, open on the interface that
        the node listens on, carries out writes to any address. Keep it to a trusted network.
    """

    settings: tuple[tuple[str, str], ...]
    one_sided: bool


def settings_for(*, listen_host: str, rdma: bool, env: Mapping[str, str] | None = None) -> UcxSettings:
    """Return the settings for a node that listens on the numeric address `listen_host`.

    A loopback node uses no TCP, so that same-host data does not take it unasked. `rdma` says whether
    UCX can use RDMA devices of this host. `env` stands in for ``os.environ``, for tests.

    Raises
    ------
    ConfigError
        If the user's variables would let UCX send larger TCP segments than it can receive, which
        crashes UCX 1.22, or have it wait for hosts that it connects to.
    """
    env = os.environ if env is None else env
    _check_segments(env)
    if env.get("UCX_TCP_CONN_NB", "y").strip().lower() not in ("y", "yes", "on", "1"):
        raise ConfigError(
            f"UCX_TCP_CONN_NB={env['UCX_TCP_CONN_NB']}: UCX would stop the whole node, deadlines and all, while a host "
            "that is gone does not answer; unset it"
        )
    settings = [("TCP_TX_SEG_SIZE", _TX_SEGMENT), ("TCP_RX_SEG_SIZE", _RX_SEGMENT)]
    # Or the progress thread stands still, with all of its clocks, while a host that is gone does not answer.
    settings.append(("TCP_CONN_NB", "y"))
    interface = interface_of(listen_host)
    if interface is not None and not rdma:
        settings.append(("NET_DEVICES", interface))  # UCX would listen on, and stripe over, all of them
    if ":" in listen_host:
        settings.append(("TCP_AF_PRIO", "inet6,inet"))  # peers that reach this node by IPv6 may have nothing else
    transports = env.get("UCX_TLS", "")
    if not transports and (interface == "lo" or rdma):
        transports = "^tcp"
        settings.append(("TLS", transports))
    if not rdma:
        # Only registering with RDMA devices is slow enough for a cache, and its hooks rewrite libc's code.
        settings.append(("RCACHE_ENABLE", "n"))
    return UcxSettings(settings=tuple(settings), one_sided=not _may_use_tcp(transports))


def _may_use_tcp(transports: str) -> bool:
    names = [name.strip() for name in transports.removeprefix("^").split(",") if name.strip()]
    listed = "tcp" in names
    if transports.startswith("^"):
        return not listed
    return listed or "all" in names or not names


def _check_segments(env: Mapping[str, str]) -> None:
    sent = env.get("UCX_TCP_TX_SEG_SIZE", _TX_SEGMENT)
    received = env.get("UCX_TCP_RX_SEG_SIZE", _RX_SEGMENT)
    sent_bytes, received_bytes = _bytes(sent), _bytes(received)
    if sent_bytes is not None and received_bytes is not None and sent_bytes > received_bytes:
        raise ConfigError(
            f"UCX_TCP_TX_SEG_SIZE={sent} exceeds UCX_TCP_RX_SEG_SIZE={received}: peers could not receive such "
            "segments; set both, or neither"
        )


def _bytes(text: str) -> int | None:
    """Return what UCX takes `text` for; None when that is UCX's to say (``auto``, garbage)."""
    found = re.fullmatch(r"(\d+)\s*([KMG]?B?)", text.strip().upper())
    return int(found[1]) * _UNITS[found[2]] if found else None
