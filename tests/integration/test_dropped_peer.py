"""A peer that is dropped is gone for whoever comes next, at once."""

from __future__ import annotations

from typing import Any

from helpers.tagged_pool import TaggedPool


def test_a_pull_right_after_its_peer_was_dropped_connects_anew() -> None:
    """Not on the connection that is about to end, which would fail it with ``PeerLost``."""
    source, target = (TaggedPool(name=name, blocks=2, block_bytes=4096) for name in ("source", "target"))
    running: Any = target.node._running

    def hand_over() -> int:
        offer = source.node.offer(blocks=[0], num_tokens=1)
        pull = target.node.pull(offer.ticket, blocks=[1]).wait(timeout_s=5)
        assert pull.wait_released(timeout_s=5)
        assert offer.wait_released(timeout_s=5)
        connected: int = target.node.peers()[-1]["peer"]
        return connected

    try:
        earlier = hand_over()
        for _ in range(50):
            target.node.drop_peer("source")
            assert running.life.engine.is_peer_lost(earlier)
            now = hand_over()
            assert now != earlier
            earlier = now
    finally:
        target.close()
        source.close()
