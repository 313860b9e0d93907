"""A node that takes nothing new, one that lets go of its memory for a while, and what their peers see of it."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.markers import LANES
from helpers.patterns import Geometry, Placement, Request, Side
from helpers.processes import Pair, wait_until

import kvlink
from kvlink import errors
from kvlink.testing import Worker

GEOMETRY = Geometry()
REQUEST = Request(source_blocks=(6, 1, 4), target_blocks=(0, 7, 3), num_tokens=11)
BLOCKS = 64  # of 2 MiB: ten milliseconds or more on the fastest lane with one copy thread
EVERYTHING = Request(source_blocks=tuple(range(BLOCKS)), target_blocks=tuple(range(BLOCKS)), num_tokens=4 * BLOCKS)


def resume(pair: Pair, side: str, placement: Placement, *, seed: int) -> None:
    """Give one side new memory, in the process and in the reference."""
    getattr(pair, side).call("resume", pair.geometry, placement, seed=seed)
    setattr(pair, f"expected_{side}", Side.random(pair.geometry, placement, seed=seed))


def pools_mapped(pid: int) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:kvlink")


def test_a_draining_source_serves_the_offers_that_live_and_makes_no_new_ones(opened: Pair) -> None:
    offered, ticket = opened.offer(REQUEST)
    with pytest.raises(errors.DeadlineExceeded, match=r"drain source.* 1 handoffs live still.* 3 blocks for readers"):
        opened.source.call("ask", "drain", deadline_s=0.05)
    with pytest.raises(errors.NotReady, match="source is being drained.*another node"):
        opened.offer(REQUEST)

    assert opened.source.call("ask", "state") == "draining"
    opened.source.start("ask", "drain", deadline_s=20)
    opened.target.call("wait", opened.pull(ticket, REQUEST))
    opened.source.result()
    opened.expect(REQUEST)
    opened.verify()
    assert opened.source.call("snapshot", offered).state == "succeeded"
    opened.source.call("ask", "drain", deadline_s=0)

    opened.source.call("ask", "resume")
    assert opened.source.call("ask", "state") == "ready"
    opened.hand_over(REQUEST)


def test_a_draining_target_finishes_its_pulls_and_starts_no_new_ones(opened: Pair) -> None:
    offered, ticket = opened.offer(REQUEST)
    opened.source.pause()
    try:
        pulled = opened.pull(ticket, REQUEST)
        with pytest.raises(errors.DeadlineExceeded, match=r"3 to write"):
            opened.target.call("ask", "drain", deadline_s=0.05)
    finally:
        opened.source.resume()
    opened.target.call("ask", "drain", deadline_s=20)
    assert opened.target.call("snapshot", pulled).state == "succeeded"
    opened.source.call("wait", offered)
    with pytest.raises(errors.NotReady, match="drained"):
        opened.pull(ticket, REQUEST)
    opened.target.call("ask", "resume")
    opened.target.call("ask", "resume")
    opened.expect(REQUEST)
    opened.hand_over(REQUEST)


@pytest.mark.parametrize("claimed", ["before", "after"])
def test_who_waits_for_an_offer_that_will_not_come_is_sent_elsewhere(opened: Pair, claimed: str) -> None:
    mint = kvlink.TicketMint([opened.source.call("ask", "descriptor")])
    ticket = mint.offer(num_tokens=REQUEST.num_tokens)
    if claimed == "after":
        opened.source.call("ask", "drain", deadline_s=5)
    pulled = opened.pull(ticket, REQUEST, deadline_s=60)
    if claimed == "before":
        opened.source.call("ask", "drain", deadline_s=5)
    with pytest.raises(errors.NotReady, match=r"from source .*source is being drained"):
        opened.target.call("wait", pulled, timeout_s=5)
    opened.target.call("wait_released", pulled)
    opened.source.call("ask", "resume")
    opened.hand_over(REQUEST)


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_suspended_node_comes_back_with_other_memory_and_another_layout(pair: Pair, side: str) -> None:
    pair.open()
    other = "target" if side == "source" else "source"
    before = pools_mapped(getattr(pair, other).pid)
    pair.hand_over(REQUEST)
    worker = getattr(pair, side)
    address, epoch, bell = (worker.call("ask", name) for name in ("address", "epoch", "fileno"))
    offered, ticket = pair.offer(REQUEST)

    for _ in range(2):
        worker.call("ask", "suspend", deadline_s=0.05 if side == "source" else 1)
    with pytest.raises(errors.NotReady, match=f"{side} is suspended"):
        pair.offer(REQUEST) if side == "source" else pair.pull(ticket, REQUEST)
    if side == "source":
        refused = pair.pull(ticket, REQUEST, deadline_s=10)
        with pytest.raises(errors.NotReady, match=r"connect to source .*source is suspended"):
            pair.target.call("wait", refused)
        assert pair.source.call("snapshot", offered).error == "NotReady"
        assert pair.source.call("snapshot", offered).released
    assert worker.call("peers") == []
    assert not any(worker.call("holds").values())
    assert worker.call("ask", "counters")["succeeded"] == 1
    wait_until(
        lambda: pools_mapped(getattr(pair, other).pid) <= before, timeout_s=5, what="the other side has unmapped it"
    )

    axes = ("block", "kv", "head", "token", "dim")
    resume(pair, side, Placement(num_blocks=16, axes=axes, memory=pair.lane.memory), seed=77)
    assert [worker.call("ask", name) for name in ("address", "fileno")] == [address, bell]
    assert worker.call("ask", "epoch") != epoch
    if side == "source":
        stale = pair.pull(ticket, REQUEST)
        with pytest.raises(errors.StalePeer, match="prefill again"):
            pair.target.call("wait", stale)
    pair.hand_over(Request(source_blocks=REQUEST.source_blocks, target_blocks=(5, 2, 6), num_tokens=12))
    assert worker.call("ask", "counters")["succeeded"] == 2


@pytest.mark.parametrize("side", ["source", "target"])
def test_suspending_in_the_middle_of_a_pull_ends_it_on_both_sides(pair: Pair, side: str) -> None:
    pair.open_large(BLOCKS)
    offered, ticket = pair.offer(EVERYTHING, ttl_s=2)
    pulled = pair.pull(ticket, EVERYTHING, deadline_s=20)
    if side == "target":
        pair.target.call("suspend_when_moving", pulled, deadline_s=0)
        first = pair.target.call("checksums", list(range(BLOCKS)))
    else:
        pair.target.call("signal_when_moving", pulled, pid=pair.source.pid, signum=0)
        pair.source.call("ask", "suspend", deadline_s=0)
        pair.source.call("fill", seed=9)
    seen = {
        "target": pair.target.call("wait_released", pulled, timeout_s=5),
        "source": pair.source.call("wait_released", offered, timeout_s=5),
    }
    if side == "target":
        assert seen["target"].error == "NotReady"
        assert pair.target.call("checksums", list(range(BLOCKS))) == first  # not a byte came after it returned
    else:
        # TransportFailed: UCX was just about to connect to what had gone. None: the last byte came before.
        assert seen["target"].error in ("NotReady", "PeerLost", "TransportFailed", None), seen["target"].message
        assert seen["source"].error in ("NotReady", None)
    assert not any(pair.holds())
    placement = Placement(num_blocks=BLOCKS, memory=pair.lane.memory)
    getattr(pair, side).call("resume", pair.geometry, placement, seed=5)
    one = Request(source_blocks=(5,), target_blocks=(9,), num_tokens=4)
    pair.target.call("wait", pair.pull(pair.offer(one)[1], one))
    pair.assert_equal_blocks(one)


@pytest.mark.parametrize("fate", ["killed", "stopped"])
def test_a_peer_that_dies_does_not_hold_up_a_suspend(spawn: Callable[..., Worker], fate: str) -> None:
    pair = Pair(spawn(), spawn(), LANES[0])
    pair.open_large(BLOCKS)
    offered, ticket = pair.offer(EVERYTHING, ttl_s=30)
    pulled = pair.pull(ticket, EVERYTHING, deadline_s=30)
    signum = signal.SIGKILL if fate == "killed" else signal.SIGSTOP
    pair.target.start("signal_when_moving", pulled, pid=pair.target.pid, signum=signum)
    began = time.monotonic()
    pair.source.call("ask", "suspend", deadline_s=1)
    assert time.monotonic() - began < 4
    assert pair.source.call("snapshot", offered).error in ("NotReady", None)
    assert not any(pair.source.call("holds").values())
    pair.source.call("resume", pair.geometry, Placement(num_blocks=BLOCKS), seed=5)
    replaced = Pair(pair.source, spawn(), pair.lane)
    replaced.geometry = pair.geometry
    replaced.target.call("open", pair.geometry, Placement(num_blocks=BLOCKS), seed=6)
    one = Request(source_blocks=(5,), target_blocks=(9,), num_tokens=4)
    replaced.target.call("wait", replaced.pull(replaced.offer(one)[1], one))
    replaced.assert_equal_blocks(one)


def test_a_node_killed_while_suspended_is_unreachable_like_any_other(spawn: Callable[..., Worker]) -> None:
    pair = Pair(spawn(), spawn(), LANES[0])
    pair.open()
    _, ticket = pair.offer(REQUEST)
    pair.source.call("ask", "suspend", deadline_s=0)
    pair.source.kill()
    pulled = pair.pull(ticket, REQUEST, deadline_s=5)
    with pytest.raises(errors.PeerUnreachable):
        pair.target.call("wait", pulled)


def test_suspending_again_and_again_leaves_no_descriptor_mapping_or_thread(pair: Pair) -> None:
    pair.open()
    placement = pair.expected_source.placement

    def left(worker: Worker) -> tuple[int, int, int]:
        root = Path(f"/proc/{worker.pid}")
        return len(list((root / "fd").iterdir())), pools_mapped(worker.pid), len(list((root / "task").iterdir()))

    def again() -> None:
        pair.source.call("ask", "suspend", deadline_s=1)
        pair.target.call("ask", "suspend", deadline_s=1)
        resume(pair, "source", placement, seed=2)
        resume(pair, "target", placement, seed=3)
        pair.hand_over(REQUEST)

    for _ in range(3):
        again()
    workers = (pair.source, pair.target)
    before = [left(worker) for worker in workers]
    for _ in range(10):
        again()

    def flat() -> bool:
        now = [left(worker) for worker in workers]
        return all(a <= b for after, first in zip(now, before, strict=True) for a, b in zip(after, first, strict=True))

    wait_until(flat, timeout_s=5, what=lambda: f"{before} is {[left(worker) for worker in workers]}")


def a_cache() -> kvlink.KVCache:
    tensor = np.zeros((2, 8, 4, 2, 8), dtype="float32")
    return kvlink.KVCache.from_tensors({"layers.0": tensor}, axes="kv block token head dim", block_tokens=4)


def test_draining_suspending_resuming_and_closing_from_any_thread_end_in_order() -> None:
    node = kvlink.Node(a_cache(), name="busy", copy_threads=1)
    others = [a_cache() for _ in range(2)]
    strange: list[BaseException] = []

    def act(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(12):
            actions: list[Callable[[], Any]] = [
                lambda: node.drain(deadline_s=0.02),
                lambda: node.suspend(deadline_s=0.02),
                lambda: node.resume(rng.choice(others)),
                lambda: node.offer([rng.randrange(8)], num_tokens=1, ttl_s=0.05),
                node.counters,
                node.holds,
            ]
            try:
                rng.choice(actions)()
            except (errors.NotReady, errors.DeadlineExceeded, errors.InvalidArgument, errors.Closed):
                pass
            except BaseException as error:  # noqa: BLE001 - a thread's error is the test's
                strange.append(error)

    threads = [threading.Thread(target=act, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    threads[0].join(timeout=60)
    node.close()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert not strange
    with pytest.raises(errors.Closed):
        node.resume(others[0])


def test_resuming_says_what_it_lacks_and_a_failed_one_leaves_the_node_suspended() -> None:
    with kvlink.Node(a_cache(), name="n", copy_threads=1) as node:
        node.resume()
        with pytest.raises(errors.InvalidArgument, match="suspend it before"):
            node.resume(a_cache())
        node.suspend(deadline_s=0)
        with pytest.raises(errors.NotReady, match="suspended"):
            assert node.cache
        with pytest.raises(errors.InvalidArgument, match="pass the cache"):
            node.resume()
        with pytest.raises(errors.InvalidArgument, match=r"must be a kvlink.KVCache"):
            node.resume(7)  # type: ignore[arg-type]
        with pytest.raises(errors.NotReady):
            node.offer([0], num_tokens=1)
        cache = a_cache()
        node.resume(cache)
        node.resume(cache)
        assert node.offer([0], num_tokens=1).state == "offered"
