"""System calls that Python lacks, as exceptions."""

from __future__ import annotations

import ctypes
import os

__all__ = ["BIND", "NEW_IPC", "NEW_NAMESPACE", "NEW_NET", "NEW_TIME", "PRIVATE", "READ_ONLY", "RECURSIVE", "REMOUNT"]
__all__ += ["check", "libc", "mount", "unshare"]

NEW_TIME, NEW_NAMESPACE, NEW_IPC, NEW_NET = 0x00000080, 0x00020000, 0x08000000, 0x40000000
READ_ONLY, REMOUNT, BIND, RECURSIVE, PRIVATE = 0x1, 0x20, 0x1000, 0x4000, 0x40000


def libc() -> ctypes.CDLL:
    """The C library of this process."""
    return ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    """Raise what the last call of `libc` that returned `result` left in errno."""
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def mount(source: str, target: str, *, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mount, in the namespace of this process."""
    done = libc().mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    check(done, f"mount {target}")


def unshare(what: int) -> None:
    """Give this process namespaces of its own; what it mounts from then on nobody else sees."""
    check(libc().unshare(what), "unshare")
    if what & NEW_NAMESPACE:
        mount("none", "/", flags=RECURSIVE | PRIVATE)
