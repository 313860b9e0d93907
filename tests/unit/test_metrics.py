"""A node's counters reach Prometheus under stable names."""

from __future__ import annotations

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from unit.fake_engine import FakeEngine, wait_until

import kvlink
from kvlink.handoff import running
from kvlink.metrics import NodeCollector


def make_node(name: str) -> kvlink.Node:
    tensor = np.zeros((2, 8, 4, 2, 8), dtype="float32")
    cache = kvlink.KVCache.from_tensors({"layers.0": tensor}, axes="kv block token head dim", block_tokens=4)
    return kvlink.Node(cache, name=name, copy_threads=1)


def test_what_nodes_count_is_scraped_until_they_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "start_engine", lambda cache, epoch, settings, **_: FakeEngine(epoch=epoch))
    registry = CollectorRegistry()
    with make_node("prefill-0") as source, make_node("decode-0") as target:
        registry.register(NodeCollector(source, target))
        target.pull(source.offer([1], num_tokens=1).ticket, [0]).wait(timeout_s=5)
        wait_until(lambda: source.counters().get("connections: accepted") == 1)
        assert registry.get_sample_value("kvlink_offers_total", {"node": "prefill-0"}) == 1
        assert registry.get_sample_value("kvlink_pulls_total", {"node": "decode-0"}) == 1
        for gauge in ("kvlink_handoffs_live", "kvlink_blocks_quarantined"):
            assert registry.get_sample_value(gauge, {"node": "decode-0"}) == 0
        accepted = {"node": "prefill-0", "result": "accepted"}
        assert registry.get_sample_value("kvlink_connections_total", accepted) == 1
    assert b'node="' not in generate_latest(registry)
