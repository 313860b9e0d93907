"""Which ``libucp.so.0`` to load. Loads nothing itself, and is asked when the first context is made."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvlink.errors import UcxUnavailable
from kvlink.transport.devices import rdma_devices

__all__ = ["UcxChoice", "find_ucx"]

_SONAME = "libucp.so.0"
_REMEDY = "install libucx-cu12 or libucx-cu13, or UCX 1.14 or newer, or set KVLINK_UCX=auto|wheel|system|/path"
_SYSTEM_FOLDERS = (
    "/usr/local/lib",
    "/opt/ucx/lib",
    "/opt/mellanox/ucx/lib",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UcxChoice:
    """A library to load, and why it.

    Attributes
    ----------
    path
        The file.
    reason
        One clause for people.
    can_use_rdma
        Whether UCX's module for verbs lies beside it.
    warnings
        What the user should know, one sentence each.
    """

    path: Path
    reason: str
    can_use_rdma: bool
    warnings: tuple[str, ...]


def find_ucx(env: Mapping[str, str] | None = None, *, root: Path = Path("/")) -> UcxChoice:
    """Choose the library as ``KVLINK_UCX`` says: ``auto`` (default), ``wheel``, ``system`` or a path.

    ``auto`` takes the wheel (``libucx-cu12`` or ``libucx-cu13``), unless this host has RDMA devices,
    which the wheels cannot use, and a system UCX is there that can. A UCX that the process has already
    loaded is taken before any of them: two versions in one process break each other. `env` stands in
    for ``os.environ`` and `root` for the file system's root, for tests.

    Raises
    ------
    UcxUnavailable
        If there is no such library, or one that was asked for by path would clash with a loaded one.
    """
    wish = (os.environ if env is None else env).get("KVLINK_UCX", "").strip() or "auto"
    devices = rdma_devices(root=root)
    path, reason = _wished(wish, devices, os.environ if env is None else env, root)
    warnings = []
    loaded = _loaded(root)
    if loaded is not None and path is not None and not _same_file(loaded, path):
        if wish not in ("auto", "wheel", "system"):
            raise UcxUnavailable(
                f"KVLINK_UCX={wish}: this process has already loaded {loaded}, and two UCX libraries in one process "
                "break each other; make the first kvlink node before whatever loads the other one"
            )
        warnings.append(f"UCX: using {loaded}, which this process has already loaded, instead of {path}")
        path, reason = loaded, "already loaded by this process"
    path = path or loaded
    if path is None:
        raise UcxUnavailable(f"no {_SONAME} was found (KVLINK_UCX={wish}): {_REMEDY}")
    can_use_rdma = _has_verbs(path)
    if devices and not can_use_rdma:
        warnings.append(
            f"UCX: {path} has no verbs, so the RDMA devices of this host ({', '.join(devices)}) are not used; "
            "install a UCX of 1.14 or newer with verbs and set KVLINK_UCX=system or its path"
        )
    return UcxChoice(path=path, reason=reason, can_use_rdma=can_use_rdma, warnings=tuple(warnings))


def _wished(wish: str, devices: tuple[str, ...], env: Mapping[str, str], root: Path) -> tuple[Path | None, str]:
    """Return the library that `wish` means, if it is there, and why it."""
    if wish == "wheel":
        return _wheel(), "KVLINK_UCX=wheel"
    if wish == "system":
        return _system(env, root), "KVLINK_UCX=system"
    if wish != "auto":
        return _at(Path(wish), wish), f"KVLINK_UCX={wish}"
    wheel, system = _wheel(), _system(env, root)
    if devices and system is not None and _has_verbs(system):
        return system, "the system's UCX can use this host's RDMA devices"
    if wheel is not None:
        return wheel, "the installed libucx wheel"
    return system, "the system's UCX; no libucx wheel is installed"


def _at(path: Path, wish: str) -> Path:
    candidates = (path,) if path.is_file() else (path / _SONAME, path / "lib" / _SONAME)
    for candidate in candidates:
        if candidate.is_file():
            return candidate.resolve()
    raise UcxUnavailable(f"KVLINK_UCX={wish}: there is no {_SONAME}; name the library or the folder that holds it")


def _wheel() -> Path | None:
    try:
        spec = importlib.util.find_spec("libucx")
    except (ImportError, ValueError):
        return None
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / "lib" / _SONAME
        if path.is_file():
            return path.resolve()
    return None


def _system(env: Mapping[str, str], root: Path) -> Path | None:
    own = [folder for folder in env.get("LD_LIBRARY_PATH", "").split(":") if folder]
    for folder in (*own, *_SYSTEM_FOLDERS):
        path = root / folder.lstrip("/") / _SONAME
        if path.is_file():
            return path
    return None


def _has_verbs(path: Path) -> bool:
    return any((path.resolve().parent / "ucx").glob("libuct_ib*.so*"))


def _loaded(root: Path) -> Path | None:
    """Return the libucp that this process has mapped, if any."""
    try:
        lines = (root / "proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        path = line.partition("/")[2]
        if Path(path).name.startswith("libucp.so"):
            return Path("/" + path)
    return None


def _same_file(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False
