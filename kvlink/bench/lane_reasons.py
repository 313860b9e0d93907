"""Why a node takes the lanes that it does, for the rows of a benchmark."""

from __future__ import annotations

import kvlink

__all__ = ["lane_reasons"]


def lane_reasons(node: kvlink.Node) -> str:
    """Return what ``Node.peers`` says of every peer that `node` reads from; what it says of several, once."""
    return "; ".join(sorted({peer["lane_reason"] for peer in node.peers()} - {""}))
