"""Peers tell how fast their bytes come."""

from __future__ import annotations

import time

from helpers.patterns import Request
from helpers.processes import Pair

BLOCKS = 16
EVERYTHING = Request(source_blocks=tuple(range(BLOCKS)), target_blocks=tuple(range(BLOCKS)), num_tokens=4 * BLOCKS)


def test_peers_tell_their_bandwidth_on_both_sides(pair: Pair) -> None:
    pair.open_large(BLOCKS)
    began = time.monotonic()
    offered, ticket = pair.offer(EVERYTHING)
    taken = pair.target.call("wait", pair.pull(ticket, EVERYTHING))
    lasted_s = time.monotonic() - began
    pair.source.call("wait_released", offered)
    (source,), (reader,) = pair.target.call("peers"), pair.source.call("peers")
    # Bytes moved in a part of this time. The source only sees when it granted them, and when they were confirmed.
    assert taken.nbytes / lasted_s < source["bytes_per_s"] < 1e12
    assert taken.nbytes / lasted_s < reader["bytes_per_s"] < source["bytes_per_s"]
