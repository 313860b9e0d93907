"""What the calling process has open towards others: sockets, and memory that has a file mode."""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

from helpers.node_worker import NodeWorker

_IP = ("tcp", "tcp6", "udp", "udp6", "udplite", "udplite6", "raw", "raw6", "icmp", "icmp6")
#: Where the inode stands in a line of each of the others.
_OTHER = {"unix": 6, "netlink": 9, "packet": 8}
_LISTENING = "0A"


@dataclass(frozen=True, kw_only=True)
class OwnSocket:
    """One socket. `address` is numeric, or the name of a unix socket, whose abstract ones begin with ``@``."""

    kind: str
    address: str
    port: int = 0
    is_listening: bool = False


def own_sockets() -> list[OwnSocket]:
    """Return all sockets of this process in its network namespace.

    Raises
    ------
    AssertionError
        If it has one that no table of the kernel tells about: then something was overlooked.
    """
    inodes = set(_inodes())
    found: dict[str, OwnSocket] = {}
    for kind in _IP:
        for fields in _lines(kind):
            if fields[9] in inodes:
                address, port = fields[1].split(":")
                found[fields[9]] = OwnSocket(
                    kind=kind, address=_address(address), port=int(port, 16), is_listening=fields[3] == _LISTENING
                )
    for kind, column in _OTHER.items():
        for fields in _lines(kind):
            if fields[column] in inodes:
                found[fields[column]] = OwnSocket(kind=kind, address=fields[7] if len(fields) > 7 else "")
    missing = {inode for inode in inodes - set(found) if inode in set(_inodes())}
    unknown = {inode for inode in missing if not _is_unbound(inode)}
    assert not unknown, f"sockets that no table names: {unknown}"
    return list(found.values())


def _inodes() -> dict[str, int]:
    """The inodes of this process's sockets, and a descriptor of each."""
    links = {}
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{descriptor}")
        except FileNotFoundError:
            continue  # that of the listing itself, or one that was closed meanwhile
        if link.startswith("socket:["):
            links[link[8:-1]] = int(descriptor)
    return links


def _is_unbound(inode: str) -> bool:
    """Whether the socket has no address: the kernel lists TCP sockets once they are bound or connected."""
    descriptor = _inodes().get(inode)
    if descriptor is None:
        return True
    with socket.socket(fileno=os.dup(descriptor)) as found:
        return found.family in (socket.AF_INET, socket.AF_INET6) and found.getsockname()[1] == 0


def _lines(kind: str) -> list[list[str]]:
    path = Path("/proc/self/net", kind)
    return [line.split() for line in path.read_text().splitlines()[1:]] if path.exists() else []


def _address(text: str) -> str:
    """Turn hexadecimal words in the byte order of the machine into an address."""
    words = [struct.pack("=I", int(text[first : first + 8], 16)) for first in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))


@dataclass(frozen=True, kw_only=True)
class OwnMemory:
    """Something with an owner and a mode that this process has open or mapped, libraries and devices apart."""

    name: str
    mode: int
    owner: int


def own_memory() -> list[OwnMemory]:
    """Return files in memory, and in folders for what passes: shared memory of UCX, pools of kvlink."""
    found = set()
    mapped = {line.split(maxsplit=5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    segments = {line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines() if "/SYSV" in line}
    for name in os.listdir("/proc/self/fd"):
        try:
            status, link = os.stat(f"/proc/self/fd/{name}"), os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        if stat.S_ISREG(status.st_mode) and link.startswith(("/dev/shm/", "/memfd:", "/tmp/kvlink")):
            found.add(OwnMemory(name=link.split(" ")[0], mode=stat.S_IMODE(status.st_mode), owner=status.st_uid))
    for name in mapped:
        if name.startswith("/dev/shm/") and Path(name).exists():
            status = Path(name).stat()
            found.add(OwnMemory(name=name, mode=stat.S_IMODE(status.st_mode), owner=status.st_uid))
    for fields in (line.split() for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]):
        if fields[1] in segments:
            found.add(OwnMemory(name=f"System V {fields[1]}", mode=int(fields[2], 8) & 0o777, owner=int(fields[7])))
    return sorted(found, key=lambda one: one.name)


class OpenWorker(NodeWorker):
    """A node worker that tells what its process has open. Files are made as if the user had no umask."""

    def __init__(self) -> None:
        super().__init__()
        os.umask(0)

    def sockets(self) -> list[OwnSocket]:
        """See `own_sockets`."""
        return own_sockets()

    def open_memory(self) -> list[OwnMemory]:
        """See `own_memory`."""
        return own_memory()
