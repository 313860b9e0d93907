"""A push goes by the connection that its target makes: one for all of them, made anew when it is gone."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from helpers.tagged_pool import TaggedPool

BLOCKS = 40


@pytest.fixture
def pools() -> Iterator[tuple[TaggedPool, TaggedPool]]:
    made = [TaggedPool(name=name, blocks=BLOCKS, block_bytes=4096, copy_threads=1) for name in ("prefill", "decode")]
    yield made[0], made[1]
    for pool in made:
        pool.close()


def push_one(source: TaggedPool, target: TaggedPool, *, block: int = 0) -> None:
    slot = target.node.reserve([block], num_tokens=1, ttl_s=10)
    push = source.node.push(slot.ticket, [block], deadline_s=10)
    push.commit(b"%d" % block)
    assert slot.wait(timeout_s=10).payload == b"%d" % block
    push.wait(timeout_s=10)
    assert slot.wait_released(timeout_s=5)
    assert push.wait_released(timeout_s=5)
    assert target.holding(block, source.tags[block]) == 1024


def test_many_pushes_at_once_have_one_connection_made(pools: tuple[TaggedPool, TaggedPool]) -> None:
    source, target = pools
    start = threading.Barrier(32)
    done: list[int] = []

    def push(block: int) -> None:
        start.wait(timeout=10)
        push_one(source, target, block=block)
        done.append(block)

    threads = [threading.Thread(target=push, args=(block,)) for block in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert sorted(done) == list(range(32))
    assert [peer["role"] for peer in source.node.peers()] == ["claimant"]
    assert not any(source.node.holds().values())


def test_a_connection_that_the_source_has_dropped_is_made_again(pools: tuple[TaggedPool, TaggedPool]) -> None:
    source, target = pools
    for _ in range(3):
        push_one(source, target)
        source.node.drop_peer("decode")
    push_one(source, target)
    assert source.node.counters()["connections: accepted"] == 4


def test_a_node_pushes_to_itself(pools: tuple[TaggedPool, TaggedPool]) -> None:
    pool, _ = pools
    slot = pool.node.reserve([0], num_tokens=1, ttl_s=10)
    push = pool.node.push(slot.ticket, [1], deadline_s=10)
    push.commit(b"own")
    assert slot.wait(timeout_s=10).payload == b"own"
    push.wait(timeout_s=10)
    assert pool.holding(0, pool.tags[1]) == 1024


def test_a_node_that_is_forgotten_with_its_handles_is_closed_though_it_has_pushed_and_expects() -> None:
    source = TaggedPool(name="prefill", blocks=2, block_bytes=4096, copy_threads=1)
    target = TaggedPool(name="decode", blocks=2, block_bytes=4096, copy_threads=1)
    push_one(source, target)
    expected = source.node.expect("room", deadline_s=600)
    running = source.node._running
    del expected
    del source
    assert running.closed
    target.close()
