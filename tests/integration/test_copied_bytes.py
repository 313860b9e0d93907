"""No lane repacks in secret: what the copy loops wrote is what the lane says it costs."""

from __future__ import annotations

import numpy as np
import pytest

import kvlink
from kvlink import memory


def node_over_new_memory(name: str) -> tuple[kvlink.Buffer, kvlink.Node]:
    buffer = kvlink.empty((2, 96, 16, 4, 32), "float32")
    cache = kvlink.KVCache.from_tensors({"layer": buffer}, axes="kv block token head dim", block_tokens=16)
    return buffer, kvlink.Node(cache, name=name)


@pytest.mark.parametrize(("lane", "times"), [("mapped", 1), ("vectored", 1), ("staged", 2)])
def test_a_lane_copies_each_byte_as_often_as_it_must(lane: str, times: int):
    source, prefill = node_over_new_memory("prefill")
    target, decode = node_over_new_memory("decode")
    with prefill, decode:
        source.numpy()[:] = np.random.default_rng(1).random(source.shape, dtype=np.float32)
        # 1,272 tokens: more than one slice of the copy threads, and a partial last block.
        offer = prefill.offer(blocks=list(range(16, 96)), num_tokens=1272)
        before = memory.copied_bytes()
        pull = decode.pull(offer.ticket, blocks=list(range(80)), deadline_s=20, require=lane)
        pull.wait(timeout_s=20)
        assert pull.wait_released(timeout_s=20)
        assert pull.bytes == 1272 * 2 * 4 * 32 * 4
        assert memory.copied_bytes() - before == times * pull.bytes
    assert (target.numpy()[:, :79] == source.numpy()[:, 16:95]).all()
    assert (target.numpy()[:, 79, :8] == source.numpy()[:, 95, :8]).all()
    assert not target.numpy()[:, 79, 8:].any()
