"""Hundreds of cancels at once, from either side: each handoff ends once, and the next one is not held up."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from helpers.markers import LANES, Lane, lanes_and_ways, skip_unless_served
from helpers.soak import SEED
from helpers.tagged_pool import TaggedPool

from kvlink.testing import FaultScript, inject_faults, remove_faults

HANDOFFS = 300
ROUNDS = 4
THREADS = 8
PROBE_S = 1.0
RELEASED_S = 10.0
#: Long enough that hardly one is over before it is cancelled; and short enough to be waited for.
LONG_MS, SHORT_MS = 5000.0, 100.0


def cancel_all(handles: Sequence[Any]) -> None:
    """Cancel from several threads that start together, each its share."""
    together = threading.Barrier(THREADS)

    def cancel(share: Sequence[Any]) -> None:
        together.wait(timeout=RELEASED_S)
        for handle in share:
            handle.cancel()

    threads = [threading.Thread(target=cancel, args=(handles[number::THREADS],)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=RELEASED_S)


def start(way: str, source: TaggedPool, target: TaggedPool, block: int, lane: Lane) -> tuple[Any, Any]:
    """One handoff of a block to the same one, by a pull or by a push; returns its two ends."""
    if way == "pull":
        offer = source.node.offer(blocks=[block], num_tokens=1)
        return offer, target.node.pull(offer.ticket, blocks=[block], require=lane.lane, deadline_s=RELEASED_S)
    slot = target.node.reserve([block], num_tokens=1, require=lane.lane, ttl_s=RELEASED_S)
    push = source.node.push(slot.ticket, [block], deadline_s=RELEASED_S)
    push.commit()
    return push, slot


@lanes_and_ways("push", lanes=[lane for lane in LANES if not lane.env])
def test_300_cancels_at_once_four_times_and_the_next_handoff_is_as_fast_as_ever(lane: Lane, way: str) -> None:
    skip_unless_served(lane)
    rng = random.Random(SEED)
    pools = [
        TaggedPool(name=name, blocks=HANDOFFS + 1, block_bytes=4096, memory=lane.memory)
        for name in ("source", "target")
    ]
    source, target = pools
    outcomes: Counter[str] = Counter()

    def probe() -> float:
        began = time.monotonic()
        given, taken = start(way, source, target, HANDOFFS, lane)
        taken.wait(timeout_s=PROBE_S)
        assert taken.wait_released(timeout_s=PROBE_S)
        assert given.wait_released(timeout_s=PROBE_S)
        target.expect(HANDOFFS, source.tags[HANDOFFS])
        return time.monotonic() - began

    try:
        probe()
        for round_number in range(ROUNDS):
            # In every other round the lane goes on after a cancel, as one over a network does.
            goes_on = bool(round_number % 2)
            delay_ms = SHORT_MS if goes_on else LONG_MS
            script = FaultScript(seed=SEED, delay_ms=delay_ms, like_rc=goes_on, error_after_s=0.01)
            inject_faults(target.node, script)
            order = rng.sample(range(HANDOFFS), HANDOFFS)
            ends = [start(way, source, target, block, lane) for block in order]
            handles = [handle for both in ends for handle in both]
            cancel_all(rng.sample(handles, 2 * HANDOFFS))
            for handle in handles:
                assert handle.wait_released(timeout_s=RELEASED_S), handle
            for block, (_, taken) in zip(order, ends, strict=True):
                outcomes[type(taken.error).__name__] += 1
                if taken.error is None:
                    target.expect(block, source.tags[block])
                    target.check([block])
            for pool in pools:
                assert not any(pool.node.holds().values())
                pool.fill(range(HANDOFFS), first_tag=1000 * (round_number + 1) * (1 + pools.index(pool)))
            remove_faults(target.node)
            assert probe() < PROBE_S
            for pool in pools:
                pool.check()
                counters = pool.node.counters()
                begun = sum(counters[name] for name in ("offers", "pulls", "pushes", "reservations"))
                assert counters["succeeded"] + counters["failed"] == begun
    finally:
        for pool in pools:
            pool.close()
    print(f"{lane.id}, {way}: KVLINK_PROPERTY_SEED={SEED}, {dict(outcomes)}")
    assert outcomes["Cancelled"] > ROUNDS * HANDOFFS // 4, "most were over before they were cancelled"
    assert set(outcomes) <= {"Cancelled", "NoneType", "UnknownHandoff"}
