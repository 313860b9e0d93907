"""Stage 4: who says what, and when, about the blocks that move.

Connecting and authenticating are here; everything with a clock is in the native core, so that an
interpreter which is busy for seconds neither looks dead nor lets a lease slip.
"""

from kvlink.handoff.handles import Handle, Offer, Pull
from kvlink.handoff.node import Node
from kvlink.handoff.ticket import Ticket, parse_ticket

__all__ = ["Handle", "Node", "Offer", "Pull", "Ticket", "parse_ticket"]
