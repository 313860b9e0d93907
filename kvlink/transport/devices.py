"""What this host has: RDMA devices, and the network interface that owns an address."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

__all__ = ["interface_of", "rdma_devices"]

_SIOCGIFADDR = 0x8915
_ADDRESS_AT = 20  # struct ifreq: 16 bytes of name, then a sockaddr_in with the address 4 bytes in


def rdma_devices(*, root: Path = Path("/")) -> tuple[str, ...]:
    """Return the names of the RDMA devices that the kernel shows, in order.

    `root` stands in for the file system's root, for tests.
    """
    try:
        return tuple(sorted(entry.name for entry in (root / "sys/class/infiniband").iterdir()))
    except OSError:
        return ()


def interface_of(host: str) -> str | None:
    """Return the interface that has the numeric address `host`; None if it stands for all, or none has it."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    if address.is_unspecified:
        return None
    if address.is_loopback:
        return "lo"  # 127.0.0.2 is nobody's, and still goes there
    if isinstance(address, ipaddress.IPv6Address):
        return _interface_of_ipv6(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
            except OSError:
                continue  # an interface without an IPv4 address
            if answer[_ADDRESS_AT : _ADDRESS_AT + 4] == address.packed:
                return name
    return None


def _interface_of_ipv6(address: ipaddress.IPv6Address) -> str | None:
    try:
        lines = Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        digits, *_, name = line.split()
        if digits == address.packed.hex():
            return name
    return None
