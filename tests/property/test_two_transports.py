"""The native plan and lanes against the Python transport: the same handoffs, the same bytes.

Cases are those of the property of handoffs: any two layouts of a cache, any tables. Each is handed over
between two processes by kvlink's native part, and inside of this one by `kvlink.fallback`: over `ucxx` or
`ucp` where one is installed, else over a stand-in.
"""

from __future__ import annotations

import asyncio
from typing import Any

import hypothesis
import pytest
from helpers import fake_ucxx
from helpers.patterns import Side, carve, first_difference
from helpers.processes import Pair
from helpers.soak import SEED, rounds
from property.test_handoff_moves_exactly import REQUESTS_PER_LAYOUT, Case, cases

import kvlink
from kvlink.fallback import PythonNode
from kvlink.transport.python_two_sided import load_two_sided

HANDOFFS = rounds(30, 500)


def two_sided() -> Any:
    """What carries the bytes of the Python transport here."""
    try:
        return load_two_sided()
    except kvlink.errors.UcxUnavailable:
        return fake_ucxx


def cache_of(side: Side) -> kvlink.KVCache:
    placement = side.placement
    tensors = carve(side.flat, side.geometry, placement)
    return kvlink.KVCache.from_tensors(tensors, axes=placement.axes_text, block_tokens=placement.block_tokens)


async def handed_over(case: Case) -> Side:
    """Return the target's side after all requests of a case, moved by the Python transport."""
    source = Side.random(case.geometry, case.source, seed=2 * case.seed)
    target = Side.random(case.geometry, case.target, seed=2 * case.seed + 1)
    options = {"advertise": "127.0.0.1", "secret": "s", "ucx": two_sided()}
    giver = await PythonNode.open(cache_of(source), **options)
    taker = await PythonNode.open(cache_of(target), **options)
    for request in case.requests:
        offer = giver.offer(list(request.source_blocks), num_tokens=request.num_tokens)
        await taker.pull(offer.ticket, list(request.target_blocks), skip_tokens=request.skip_tokens)
        await offer.wait(timeout_s=10)
    await giver.close()
    await taker.close()
    return target


@pytest.mark.slow
def test_native_and_python_transports_move_the_same_bytes(opened: Pair) -> None:
    done = 0

    @hypothesis.seed(SEED)
    @hypothesis.settings(
        max_examples=-(-HANDOFFS // REQUESTS_PER_LAYOUT),
        database=None,
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=cases(("pool",)))
    def run(case: Case) -> None:
        nonlocal done
        opened.open(case.geometry, source=case.source, target=case.target, seed=case.seed)
        for request in case.requests:
            offered, ticket = opened.offer(request)
            opened.target.call("wait", opened.pull(ticket, request, require=None))
            opened.source.call("wait", offered)
            done += 1
        by_python = asyncio.run(asyncio.wait_for(handed_over(case), 60))
        wrong = first_difference(by_python.flat, opened.target.call("memory"))
        assert not wrong, wrong

    run()
    print(f"two transports, {two_sided().__name__}: {done} handoffs, KVLINK_PROPERTY_SEED={SEED}")
    assert done >= HANDOFFS
