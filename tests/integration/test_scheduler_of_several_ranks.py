"""A prefill engine of several ranks: one has the scheduler, and all push into what that has reserved."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest
from helpers.processes import wait_until
from helpers.scheduled import BLOCKS, TOKENS, Decoder, Memory, Prefill

import kvlink
from kvlink import errors
from kvlink.directory import StaticDirectory
from kvlink.scheduler import Scheduler


@pytest.fixture
def directory() -> StaticDirectory:
    return StaticDirectory()


@pytest.fixture
def worker(directory: StaticDirectory) -> Iterator[Decoder]:
    made = Decoder("decode-0", directory)
    yield made
    made.close()


@pytest.fixture
def two_ranks(directory: StaticDirectory) -> Iterator[tuple[Prefill, Memory, kvlink.Node]]:
    """A prefill engine of two ranks, one head each: the first with the scheduler, and memory and node of the second."""
    heads = [Memory(heads=1, part={"heads": range(head, head + 1), "total_kv_heads": 2}) for head in range(2)]
    second = kvlink.Node(heads[1].cache, name="prefill-1", copy_threads=1)
    first = Prefill(directory, memory=heads[0], ranks=[second.descriptor])
    yield first, heads[1], second
    first.close()
    second.close()


async def test_all_ranks_of_a_prefill_engine_push_their_heads_into_what_one_has_reserved(
    two_ranks: tuple[Prefill, Memory, kvlink.Node], worker: Decoder
) -> None:
    first, memory, second = two_ranks
    first.memory.tensor[:, 7] = 8
    memory.tensor[:, 3] = 5
    placement = await first.scheduler.place(num_tokens=TOKENS)
    push = await first.scheduler.begin(placement, blocks=[7], num_tokens=TOKENS, ttl_s=10, label="req-1")
    push.commit(payload=b"first")
    beside = second.push(json.loads(json.dumps(push.ticket)), [3], deadline_s=10)
    assert worker.arrived.empty()  # a half is no request
    beside.commit()
    await push
    await beside
    arrival = worker.arrived.get(timeout=5)
    assert (arrival.label, arrival.payload, arrival.source, arrival.handoff) == (
        "req-1",
        b"first",
        "prefill-0",
        beside.id,
    )
    block = arrival.blocks["full"][0]
    assert (worker.memory.tensor[:, block, :, 0] == 8).all()
    assert (worker.memory.tensor[:, block, :, 1] == 5).all()


async def test_a_rank_that_dies_before_its_part_is_there_ends_the_request_and_the_blocks_come_back(
    two_ranks: tuple[Prefill, Memory, kvlink.Node], worker: Decoder
) -> None:
    first, _, second = two_ranks
    placement = await first.scheduler.place(num_tokens=TOKENS)
    push = await first.scheduler.begin(placement, blocks=[7], num_tokens=TOKENS, ttl_s=30)
    beside = second.push(push.ticket, [3], deadline_s=30)
    push.commit()
    second.close()
    with pytest.raises(errors.Closed):
        await beside
    with pytest.raises(errors.KvlinkError):
        await asyncio.wait_for(push, 10)
    wait_until(lambda: worker.pool.counts() == (BLOCKS, 0, 0), timeout_s=10, what="blocks back")
    assert worker.arrived.empty()


async def test_an_engine_of_several_ranks_begins_and_does_not_hand_off_by_itself(
    two_ranks: tuple[Prefill, Memory, kvlink.Node], worker: Decoder, directory: StaticDirectory
) -> None:
    first, _, second = two_ranks
    with pytest.raises(errors.InvalidArgument, match="this engine has other ranks: begin, give them"):
        await first.hand_off(1)
    for ranks in ([first.node.descriptor], [second.descriptor] * 2):
        with pytest.raises(errors.InvalidArgument, match="ranks names a node twice, or the scheduler's own"):
            Scheduler(first.node, directory=directory, ranks=ranks)
