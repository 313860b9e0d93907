"""Where a node listens, and what it tells others about that."""

from __future__ import annotations

import functools
import ipaddress
import socket
from typing import Any

from kvlink.errors import ConfigError, OutOfMemory, PeerUnreachable

__all__ = ["Address", "SocketAddress", "join_address", "listen_on", "resolve", "split_address"]

Address = tuple[str, int]

SocketAddress = tuple[Any, ...]
"""What the socket functions call an address; its form depends on the family."""

# Connections that the kernel completes before `accept` gets to them: a whole cluster's nodes may
# dial a node in the moment that it starts. The kernel caps it at net.core.somaxconn.
_BACKLOG = 1024


@functools.lru_cache(maxsize=1024)  # every ticket names its sources, and they are few
def split_address(text: str, *, lowest_port: int = 1) -> Address:
    """Return host and port of ``host:port`` or ``[ipv6]:port``.

    Raises
    ------
    ValueError
        If it is neither, or the port is outside [`lowest_port`, 65535].
    """
    host, colon, digits = text.rpartition(":")
    if not colon or not digits.isascii() or not digits.isdigit() or len(digits) > 5:
        raise ValueError(f"{text!r} is not host:port")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{text!r}: write an IPv6 address in brackets, as in [::1]:7000")
    if not host or any(c in "[]" or c.isspace() or not c.isprintable() for c in host):
        raise ValueError(f"{text!r} names no host")
    port = int(digits)
    if not lowest_port <= port <= 65535:
        raise ValueError(f"{text!r}: port {port} is outside [{lowest_port}, 65535]")
    return host, port


def join_address(host: str, port: int) -> str:
    """Return ``host:port``, with brackets where `host` is an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolve(address: Address) -> list[tuple[socket.AddressFamily, SocketAddress]]:
    """Return the socket addresses of `address`; may wait for the name service.

    Raises
    ------
    PeerUnreachable
        If the name is not known.
    """
    host, port = address
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise PeerUnreachable(f"the name {host!r} cannot be resolved: {error}") from None
    return [(socket.AddressFamily(family), place) for family, _, _, _, place in found]


def listen_on(text: str, *, advertise: str | None, has_secret: bool) -> tuple[socket.socket, str]:
    """Bind and listen; return the listener and the address to tell others.

    Raises
    ------
    ConfigError
        If an address is malformed or cannot be bound, if the listener would be reachable from
        other hosts while there is no secret, or if it listens on every interface and `advertise`
        does not say which address others should use.
    """
    try:
        host, port = split_address(_text(text), lowest_port=0)
    except ValueError as error:
        raise ConfigError(f"listen: {error}") from None
    try:
        family, place = resolve((host, port))[0]
    except PeerUnreachable as error:
        raise ConfigError(f"listen={text!r}: {error}") from None
    bound = ipaddress.ip_address(str(place[0]).partition("%")[0])
    if not has_secret and not bound.is_loopback:
        raise ConfigError(
            f"listen={text!r} is reachable from other hosts and there is no secret: "
            "pass secret= (the same on every node), or listen on 127.0.0.1"
        )
    if bound.is_unspecified and advertise is None:
        raise ConfigError(f"listen={text!r} is every interface: pass advertise= with the address that peers can reach")
    listener = _bound(family, place, text)
    try:
        return listener, _advertised(advertise, host, listener.getsockname()[1])
    except ConfigError:
        listener.close()
        raise


def _bound(family: socket.AddressFamily, place: SocketAddress, text: str) -> socket.socket:
    try:
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise OutOfMemory(f"no socket to listen on {text!r}: {error.strerror}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        # Accepted connections inherit it: a control message must not wait for the one before it.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind(place)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {text!r}: {error.strerror or error}") from None
    return listener


def _advertised(advertise: str | None, host: str, port: int) -> str:
    if advertise is None:
        return join_address(host, port)
    try:
        told, told_port = split_address(_with_port(_text(advertise)), lowest_port=0)
    except ValueError as error:
        raise ConfigError(f"advertise: {error}") from None
    return join_address(told, told_port or port)


def _with_port(text: str) -> str:
    """Return `text` with port 0 where it names a host alone."""
    if text.count(":") > 1 and not text.startswith("["):
        return f"[{text}]:0"
    return text if ":" in text and not text.endswith("]") else f"{text}:0"


def _text(given: object) -> str:
    if not isinstance(given, str):
        raise ConfigError(f"an address must be text such as '127.0.0.1:0', not {given!r}")
    return given
