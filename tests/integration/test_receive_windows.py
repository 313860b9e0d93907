"""Pulls beyond the windows wait for their turn, all of them get it, and no peer waits for another's queue."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest
from helpers.markers import LANES
from helpers.patterns import Geometry, Placement
from helpers.processes import Pair

import kvlink
from kvlink import errors
from kvlink.testing import Worker

BLOCK_BYTES = 2 << 20
GEOMETRY = Geometry(layers=("layers.0",), heads=8, head_dim=8192)
BLOCKS = 64
STALLED = 20


def test_pulls_beyond_the_windows_wait_in_turn_and_one_larger_than_them_still_moves(pair: Pair) -> None:
    limits = kvlink.Limits(peer_window_bytes=2 * BLOCK_BYTES, node_window_bytes=3 * BLOCK_BYTES)
    placement = Placement(num_blocks=BLOCKS, memory=pair.lane.memory)
    pair.geometry = GEOMETRY
    pair.source.call("open", GEOMETRY, placement, seed=2, name="source")
    pair.target.call("open", GEOMETRY, placement, seed=3, name="target", limits=limits, copy_threads=1)
    # Ones and twos, and in their midst one of eight blocks.
    sizes = [*([1, 2] * 8), 8, *([2, 1] * 8)]
    pulls, first = [], 0
    for size in sizes:
        blocks = list(range(first, first + size))
        first += size
        _, ticket = pair.source.call("offer", blocks, 4 * size)
        pulls.append((pair.target.call("pull", ticket, blocks, require=pair.lane.lane), blocks))
    for pulled, blocks in pulls:
        pair.target.call("wait", pulled, timeout_s=20)
        assert pair.source.call("checksums", blocks) == pair.target.call("checksums", blocks)
    assert not any(pair.target.call("holds").values())


def test_pulls_that_wait_for_a_window_end_by_their_deadline_and_a_stopped_peer_holds_up_no_other(
    spawn: Callable[..., Worker],
) -> None:
    lane = LANES[3]
    stopped, healthy, target = (spawn(lane.env) for _ in range(3))
    placement = Placement(num_blocks=BLOCKS, memory=lane.memory)
    # The stopped peer may fill its own window, and the rest of the node's is for others.
    limits = kvlink.Limits(peer_window_bytes=32 * BLOCK_BYTES, node_window_bytes=40 * BLOCK_BYTES)
    for seed, (name, worker) in enumerate({"stopped": stopped, "healthy": healthy, "target": target}.items()):
        options = {"limits": limits} if name == "target" else {}
        worker.call("open", GEOMETRY, placement, seed=seed, name=name, copy_threads=1, **options)
    for source in (stopped, healthy):  # connected, so that only the bytes have to wait
        target.call("wait", target.call("pull", source.call("offer", [0], 4)[1], [0], require="staged"))
        target.call("wait_released", 0 if source is stopped else 1)

    tickets = [stopped.call("offer", [2 * index, 2 * index + 1], 8, ttl_s=30)[1] for index in range(STALLED)]
    waiting = [
        target.call("pull", ticket, [2 * index + 4, 2 * index + 5], deadline_s=4, require="staged")
        for index, ticket in enumerate(tickets)
    ]
    target.call("signal_when_moving", waiting[0], pid=stopped.pid, signum=signal.SIGSTOP)
    began = time.monotonic()
    for index in range(3):
        _, ticket = healthy.call("offer", [index], 4)
        pulled = target.call("pull", ticket, [index], deadline_s=10, require="staged")
        target.call("wait", pulled, timeout_s=10)
        target.call("wait_released", pulled)
    assert time.monotonic() - began < 3

    ended = []
    for pulled in waiting:
        try:
            ended.append(target.call("wait", pulled, timeout_s=10).error)
        except errors.DeadlineExceeded as error:
            ended.append(type(error).__name__)
    assert "DeadlineExceeded" in ended
    assert time.monotonic() - began < 8
    for pulled in waiting:
        target.call("wait_released", pulled, timeout_s=5)
    stopped.resume()
    assert not any(target.call("holds").values())


@pytest.mark.parametrize("field", ["peer_window_bytes", "node_window_bytes"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "1GiB", 1 << 60])
def test_a_window_that_cannot_be_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(errors.ConfigError, match=field):
        kvlink.Limits(**{field: value})  # type: ignore[arg-type]
