"""Questions between nodes, for what stands right of this stage: ``ask`` waits, so it has a thread of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlink.handoff.answer import Handler

if TYPE_CHECKING:
    from kvlink.handoff.node import Node

__all__ = ["answer", "ask"]


def ask(node: Node, address: str, kind: str, *, body: bytes, deadline_s: float, epoch: str = "") -> bytes:
    """Return what the node at `address` answers `node`, see ``Asker.ask``. `epoch`: the life it must be in."""
    return node._running.ask(address, kind, body, deadline_s=deadline_s, epoch=bytes.fromhex(epoch))


def answer(node: Node, kind: str, handler: Handler) -> None:
    """Let `handler` answer every question of `kind` that `node` is asked."""
    node._running.answerer.register(kind, handler)
