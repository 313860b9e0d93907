"""Which systems `kvlink bench transfer --peers` names, and which of them can be had here."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from kvlink.bench.peers import PEERS, PeerPlace, PeerSystem
from kvlink.bench.socket_system import SocketSystem
from kvlink.bench.systems import KvlinkSystem, MemcpySystem
from kvlink.bench.transfer import Start
from kvlink.errors import InvalidArgument

__all__ = ["OWN", "choose_systems", "parse_systems"]

#: Systems that need nothing but kvlink.
OWN: dict[str, Start] = {"kvlink": KvlinkSystem, "memcpy": MemcpySystem, "socket": SocketSystem}


def parse_systems(text: str) -> list[str]:
    """Return the names of ``kvlink,memcpy,nixl``, each once.

    Raises
    ------
    InvalidArgument
        If one is not known.
    """
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    known = [*OWN, *PEERS]
    for name in names:
        if name not in known:
            raise InvalidArgument(f"peer {name!r} is none of {', '.join(known)}")
    return names


def choose_systems(names: Sequence[str], place: PeerPlace) -> tuple[dict[str, Start], list[str]]:
    """Return how to start each of `names` that can be had, memcpy among them, and why the others cannot."""
    chosen: dict[str, Start] = {}
    missing = []
    for name in names:
        if name in OWN:
            chosen[name] = OWN[name]
        elif reason := place.missing(name):
            missing.append(reason)
        else:
            chosen[name] = partial(PeerSystem, name, place)
    chosen.setdefault("memcpy", MemcpySystem)
    return chosen, missing
