"""A pool of blocks under handoffs that are aborted at any moment: it adds up, and no block comes back too early.

Both sides free their blocks while handoffs still use them, in pools so small that the next round needs them.
`KVLINK_SOAK=1` runs 3,000 rounds a lane in place of 60, `KVLINK_PROPERTY_SEED` says which.
"""

from __future__ import annotations

import numpy as np
import pytest
from helpers.markers import LANES, Lane, skip_unless_served
from helpers.processes import spawn_worker
from helpers.soak import SEED, rounds

from kvlink.testing import FaultScript

PROCESS = "helpers.pooled_worker:PooledWorker"
ROUNDS = rounds(60, 3000)
BLOCKS = 7
BLOCK_BYTES = 64 << 10
LATE_S = 0.01


@pytest.mark.slow
@pytest.mark.parametrize("lane", [lane for lane in LANES if not lane.env], ids=lambda lane: lane.id)
def test_blocks_come_back_only_once_nothing_uses_them(lane: Lane) -> None:
    skip_unless_served(lane)
    rng = np.random.default_rng([SEED, LANES.index(lane)])
    source, target = (spawn_worker(PROCESS) for _ in range(2))
    options = {"blocks": BLOCKS, "block_bytes": BLOCK_BYTES, "memory": lane.memory, "copy_threads": 1}
    source.call("open", name="source", **options)
    target.call("open", name="target", lanes=[lane.lane], **options)
    for number in range(ROUNDS):
        count = int(rng.integers(1, 5))
        script = FaultScript(
            seed=number,
            delay_ms=1000 * LATE_S if number else 0,
            like_rc=bool(rng.integers(2)),
            error_after_s=LATE_S,
        )
        cancelled = number > 0 and rng.integers(4) > 0
        target.call(
            "pull",
            source.call("offer", count),
            count,
            cancel_after_s=float(rng.uniform(0, 1.5 * LATE_S)) if cancelled else None,
            script=script,
        )
    taken, seen = target.call("finish", cancel=False)
    given, _ = source.call("finish", cancel=True)
    print(f"{lane.id}: KVLINK_PROPERTY_SEED={SEED}, pulls {taken}, offers {given}, looks {seen}")
    assert sum(taken.values()) == sum(given.values()) == ROUNDS
    assert taken["NoneType"] > 0
    assert taken["Cancelled"] > ROUNDS // 10
    assert seen["quarantined"] > 0
    for worker in (source, target):
        worker.call("close")
        assert worker.close() == 0, worker.stderr()
