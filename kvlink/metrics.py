"""What a node counts, as Prometheus scrapes it."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvlink.errors import Closed
from kvlink.handoff import Node

__all__ = ["NodeCollector"]

_CONNECTION = "connections: "

# One name a line: what Node.counters calls it, what Prometheus calls it, and what it means.
_COUNTERS = {
    "offers": ("kvlink_offers", "Offers made by this node."),
    "pulls": ("kvlink_pulls", "Pulls started by this node."),
    "reservations": ("kvlink_reservations", "Reservations made by this node."),
    "pushes": ("kvlink_pushes", "Pushes started by this node."),
    "succeeded": ("kvlink_handoffs_succeeded", "Offers and pulls that ended in success."),
    "failed": ("kvlink_handoffs_failed", "Offers and pulls that ended in an error."),
    "refused_claims": ("kvlink_claims_refused", "Claims of other nodes that were refused."),
    "stale_messages": ("kvlink_messages_stale", "Messages of handoffs that were over, and did nothing."),
    "protocol_errors": ("kvlink_protocol_errors", "Connections that ended because the peer broke the protocol."),
    "bytes_pulled": ("kvlink_pulled_bytes", "Bytes of KV cache read from other nodes."),
}
_GAUGES = {
    "shared": ("kvlink_blocks_offered", "Blocks that live offers hold."),
    "exclusive": ("kvlink_blocks_written", "Blocks that live pulls hold."),
    "quarantined": ("kvlink_blocks_quarantined", "Blocks that pulls may still write that have ended."),
    "handoffs": ("kvlink_handoffs_live", "Offers and pulls without an outcome."),
}


class NodeCollector(Collector):
    """Gives the counters of some nodes to a registry; each sample has the node's name as label.

    Register it with ``prometheus_client.REGISTRY.register(NodeCollector(node))``. A node that is
    closed is left out.
    """

    def __init__(self, *nodes: Node) -> None:
        self._nodes = nodes

    def collect(self) -> Iterator[Metric]:
        """Yield the present values; called by the registry at each scrape."""
        read = {}
        for node in self._nodes:
            try:
                read[node.name] = (node.counters(), node.holds())
            except Closed:
                continue
        for key, (name, meaning) in _COUNTERS.items():
            counter = CounterMetricFamily(name, meaning, labels=["node"])
            for node_name, (counters, _) in read.items():
                counter.add_metric([node_name], counters.get(key, 0))
            yield counter
        for key, (name, meaning) in _GAUGES.items():
            gauge = GaugeMetricFamily(name, meaning, labels=["node"])
            for node_name, (_, holds) in read.items():
                gauge.add_metric([node_name], holds.get(key, 0))
            yield gauge
        connections = CounterMetricFamily(
            "kvlink_connections", "Connections of other nodes, by how their handshake ended.", labels=["node", "result"]
        )
        for node_name, (counters, _) in read.items():
            for key, count in counters.items():
                if key.startswith(_CONNECTION):
                    connections.add_metric([node_name, key.removeprefix(_CONNECTION)], count)
        yield connections
