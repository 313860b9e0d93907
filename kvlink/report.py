"""The one object that every command writes for ``--json``."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kvlink
from kvlink.errors import ConfigError

__all__ = ["check_path", "command_line", "machine_facts", "write_report"]

#: What of the environment changes what is measured, and is told with the command.
_SETTINGS = ("UCX_TLS", "UCX_NET_DEVICES")


def machine_facts() -> dict[str, Any]:
    """Return what a reader must know of this machine to judge a number."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def check_path(path: str) -> str:
    """Return `path` if ``write_report`` can write there: asked before what it reports is measured.

    Raises
    ------
    ConfigError
        If the file cannot be written.
    """
    if path not in ("", "-"):
        try:
            with Path(path).open("a", encoding="utf-8"):
                pass
        except OSError as error:
            raise ConfigError(f"--json: {path} cannot be written: {error.strerror}") from None
    return path


def write_report(path: str, rows: Sequence[Any]) -> None:
    """Write ``{"kvlink", "command", "machine", "rows"}`` as JSON to `path`; ``-`` is standard output."""
    report = {
        "kvlink": kvlink.__version__,
        "command": command_line(),
        "machine": machine_facts(),
        "rows": list(rows),
    }
    text = json.dumps(report, indent=2) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        Path(path).write_text(text, encoding="utf-8")


def command_line() -> list[str]:
    """Return the command of this process, with the settings of UCX that it was given, as one would type it."""
    settings = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name in _SETTINGS]
    return [*settings, "kvlink", *sys.argv[1:]]


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
