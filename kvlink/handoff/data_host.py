"""Which address of this host carries the bytes of a node, where it listens on one or on all of them."""

from __future__ import annotations

import ipaddress

from kvlink.errors import PeerUnreachable
from kvlink.handoff.address import resolve, split_address
from kvlink.transport import interface_of

__all__ = ["data_host"]


def data_host(bound: str, advertised: str) -> str:
    """Return the numeric address whose interface carries the bytes of a node that is bound to `bound`.

    A node that listens on every interface uses the one whose address it advertises. Where that is nobody's
    here, as behind a translating router, or this host alone, it is `bound`: every interface.
    """
    if not ipaddress.ip_address(bound.partition("%")[0]).is_unspecified:
        return bound
    try:
        told = [str(place[0]) for _, place in resolve(split_address(advertised))]
    except (PeerUnreachable, ValueError):
        return bound  # a name that only peers know
    return next((host for host in told if interface_of(host) not in (None, "lo")), bound)
