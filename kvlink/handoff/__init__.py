"""Stage 4: who says what, and when, about the blocks that move.

Connecting and authenticating are here; everything with a clock is in the native core, so that an
interpreter which is busy for seconds neither looks dead nor lets a lease slip.

The names below are loaded when they are first used: a scheduler that only mints tickets has neither
the native core nor UCX in its process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvlink.handoff.block_pool import BlockPool as BlockPool
    from kvlink.handoff.handles import Handle as Handle
    from kvlink.handoff.handles import Offer as Offer
    from kvlink.handoff.handles import Pull as Pull
    from kvlink.handoff.mint import TicketMint as TicketMint
    from kvlink.handoff.node import Node as Node
    from kvlink.handoff.push import Push as Push
    from kvlink.handoff.push import Slot as Slot
    from kvlink.handoff.ticket import Ticket as Ticket
    from kvlink.handoff.ticket import parse_ticket as parse_ticket

__all__ = ["BlockPool", "Handle", "Node", "Offer", "Pull", "Push", "Slot", "Ticket", "TicketMint", "parse_ticket"]

_HOME = {
    "BlockPool": "block_pool",
    "Handle": "handles",
    "Node": "node",
    "Offer": "handles",
    "Pull": "handles",
    "Push": "push",
    "Slot": "push",
    "Ticket": "ticket",
    "TicketMint": "mint",
    "parse_ticket": "ticket",
}


def __getattr__(name: str) -> Any:
    """Load a public name from the module that defines it (PEP 562)."""
    from importlib import import_module

    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'kvlink.handoff' has no attribute {name!r}")
    value = getattr(import_module(f"kvlink.handoff.{home}"), name)
    globals()[name] = value
    return value
