"""What kvlink finds on this machine, one line a check; lanes are tried, not guessed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import kvlink
from kvlink.errors import KvlinkError
from kvlink.transport import LANES

__all__ = ["Finding", "examine", "is_healthy", "print_findings"]

_TRIAL_BYTES = 1 << 20
_TRIAL_BLOCK_BYTES = 64 << 10


class Finding(TypedDict):
    """The result of one check."""

    check: str
    ok: bool
    detail: str


def examine() -> list[Finding]:
    """Run every check. Takes a few seconds: each lane is tried between two processes. Raises nothing."""
    return [_native(), _ucx(), _rdma(), *(_lane(lane) for lane in LANES)]


def is_healthy(findings: Sequence[Finding]) -> bool:
    """Return whether kvlink can work here: the native core and UCX are there, and at least one lane."""
    needed = [finding["ok"] for finding in findings if finding["check"] in ("kvlink", "UCX")]
    lanes = [finding["ok"] for finding in findings if finding["check"].startswith("lane ")]
    return all(needed) and any(lanes)


def print_findings(findings: Sequence[Finding]) -> None:
    """Print one line a check."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
    for finding in findings:
        mark = Text("ok  ", style="green") if finding["ok"] else Text("no  ", style="yellow")
        console.print(mark.append(f"{finding['check']}: {finding['detail']}", style="default"), soft_wrap=True)


def _native() -> Finding:
    try:
        from kvlink import _native
    except ImportError as error:
        detail = f"{kvlink.__version__}, without its native core ({error}): install kvlink again"
        return {"check": "kvlink", "ok": False, "detail": detail}
    return {"check": "kvlink", "ok": True, "detail": f"{kvlink.__version__}, {_native.__file__}"}


def _ucx() -> Finding:
    from kvlink.transport import find_ucx, open_ucx

    try:
        choice = find_ucx()
        context = open_ucx(listen_host="127.0.0.1")
    except KvlinkError as error:
        return {"check": "UCX", "ok": False, "detail": _one_line(error)}
    version = "not used" if context is None else context.version
    return {"check": "UCX", "ok": context is not None, "detail": f"{version}, {choice.path} ({choice.reason})"}


def _rdma() -> Finding:
    from kvlink.transport import find_ucx, rdma_devices

    devices = rdma_devices()
    if not devices:
        return {"check": "RDMA", "ok": True, "detail": "this host has no RDMA devices"}
    try:
        choice = find_ucx()
    except KvlinkError as error:
        return {"check": "RDMA", "ok": False, "detail": f"{', '.join(devices)}: {_one_line(error)}"}
    detail = f"{', '.join(devices)}: {'usable' if choice.can_use_rdma else 'not usable by this UCX'}"
    return {"check": "RDMA", "ok": choice.can_use_rdma, "detail": detail}


def _lane(lane: str) -> Finding:
    from kvlink.bench.scattered import Geometry
    from kvlink.bench.transfer import Setting, measure

    memory = "kvlink" if lane == "mapped" else "foreign"
    geometry = Geometry(block_bytes=_TRIAL_BLOCK_BYTES, total_bytes=_TRIAL_BYTES)
    try:
        row = measure(Setting(geometry=geometry, lane=lane, memory=memory, threads=1, repeat=1))
    except KvlinkError as error:
        return {"check": f"lane {lane}", "ok": False, "detail": _one_line(error)}
    detail = "works between two processes of this host" if row["verified"] else "moved wrong bytes: report this"
    return {"check": f"lane {lane}", "ok": row["verified"], "detail": detail}


def _one_line(error: KvlinkError) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
