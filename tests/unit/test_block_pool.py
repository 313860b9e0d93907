"""Block numbers that come back only once no handoff uses them, and of which none is ever lost or given twice."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import hypothesis
import numpy as np
import pytest
from helpers.soak import SEED
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvlink import BlockPool
from kvlink.errors import InvalidArgument, OutOfMemory


class Handle:
    """What a pool sees of an offer or a pull."""

    def __init__(self) -> None:
        self.released = False


def test_each_block_is_given_once_and_only_what_was_given_comes_back() -> None:
    pool = BlockPool(5, shuffle_seed=1)
    first, second = pool.allocate(3), pool.allocate(2)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    with pytest.raises(OutOfMemory, match="allocate 1 blocks: 0 of 5 are free, 5 are held"):
        pool.allocate(1)
    pool.free(first)
    assert pool.num_free == 3
    for stray in (first, (*second, second[0]), (9,), (-1,), ("0",)):
        with pytest.raises(InvalidArgument):
            pool.free(stray)
        with pytest.raises(InvalidArgument):
            pool.give(stray, Handle())
    assert pool.counts() == (3, 2, 0)
    assert pool.allocate(0) == ()


def test_the_last_freed_is_the_first_taken() -> None:
    pool = BlockPool(4)
    assert pool.allocate(3) == (0, 1, 2)
    pool.free((1, 2))
    assert pool.allocate(2) == (1, 2)
    pool.free(np.array([2, 0], dtype=np.int32))
    taken = pool.allocate(2)
    assert taken == (2, 0)
    assert all(type(block) is int for block in taken)


def test_a_freed_block_waits_for_every_handle_that_it_was_given_to() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    prefix, request = Handle(), Handle()
    assert pool.give(blocks[:2], prefix) is prefix
    pool.give(blocks[:1], request)
    pool.free(blocks)
    assert pool.counts() == (1, 0, 2)
    with pytest.raises(InvalidArgument, match="block 0 is freed already"):
        pool.free(blocks[:1])
    prefix.released = True
    assert pool.counts() == (2, 0, 1)
    with pytest.raises(OutOfMemory, match="1 wait for handoffs to be released"):
        pool.allocate(3)
    request.released = True
    assert sorted(pool.allocate(3)) == [0, 1, 2]


def test_handles_that_are_released_before_the_blocks_are_freed_hold_nothing_back() -> None:
    pool = BlockPool(1)
    blocks, handle = pool.allocate(1), Handle()
    pool.give(blocks, handle)
    handle.released = True
    pool.free(blocks)
    assert pool.counts() == (1, 0, 0)


@pytest.mark.parametrize("count", [-1, True, 1.0, "1"])
def test_what_is_no_count_is_refused(count: object) -> None:
    pool = BlockPool(2)
    with pytest.raises(InvalidArgument, match="count"):
        pool.allocate(count)  # type: ignore[arg-type]  # what the type refuses too
    with pytest.raises(InvalidArgument, match="num_blocks"):
        BlockPool(count)  # type: ignore[arg-type]  # likewise


class Broken(Handle):
    """A handle that fails to answer."""

    @property
    def released(self) -> bool:
        raise RuntimeError("broken")

    @released.setter
    def released(self, value: bool) -> None:
        pass


def test_a_handle_that_cannot_answer_changes_nothing() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    pool.give(blocks[1:2], Broken())
    with pytest.raises(RuntimeError, match="broken"):
        pool.free(blocks)
    assert pool.counts() == (0, 3, 0)


class PoolAndModel(RuleBasedStateMachine):
    """Anything that an engine may do, against sets that cannot be wrong."""

    grants = Bundle("grants")
    handles = Bundle("handles")

    @initialize(total=st.integers(1, 12), seed=st.none() | st.integers(0, 9))
    def start(self, total: int, seed: int | None) -> None:
        self.total = total
        self.pool = BlockPool(total, shuffle_seed=seed)
        self.held: dict[int, list[Handle]] = {}
        self.freed: dict[int, list[Handle]] = {}

    def model_free(self) -> set[int]:
        waiting = {block for block, given in self.freed.items() if any(not handle.released for handle in given)}
        return set(range(self.total)) - set(self.held) - waiting

    @rule(target=grants, count=st.integers(0, 5))
    def allocate(self, count: int) -> tuple[int, ...]:
        free = self.model_free()
        if count > len(free):
            with pytest.raises(OutOfMemory):
                self.pool.allocate(count)
            return ()
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        assert set(blocks) <= free
        for block in blocks:
            self.freed.pop(block, None)
            self.held[block] = []
        return blocks

    @rule(target=handles, blocks=grants)
    def give(self, blocks: tuple[int, ...]) -> Handle:
        handle = Handle()
        if set(blocks) <= set(self.held):
            self.pool.give(blocks, handle)
            for block in blocks:
                self.held[block].append(handle)
        else:
            with pytest.raises(InvalidArgument):
                self.pool.give(blocks, handle)
        return handle

    @rule(handle=handles)
    def release(self, handle: Handle) -> None:
        handle.released = True

    @rule(blocks=grants, stray=st.lists(st.integers(-1, 12), max_size=2))
    def free(self, blocks: tuple[int, ...], stray: list[int]) -> None:
        freed = [*blocks, *stray]
        if len(set(freed)) != len(freed) or not set(freed) <= set(self.held):
            with pytest.raises(InvalidArgument):
                self.pool.free(freed)
            return
        self.pool.free(freed)
        for block in freed:
            self.freed[block] = self.held.pop(block)

    @invariant()
    def all_blocks_are_accounted_for(self) -> None:
        free, held, quarantined = self.pool.counts()
        assert free + held + quarantined == self.total
        assert held == len(self.held)
        assert free == len(self.model_free())


def test_no_order_of_calls_loses_a_block_or_gives_it_twice() -> None:
    settings = hypothesis.settings(max_examples=150, stateful_step_count=40, database=None, deadline=None)
    run_state_machine_as_test(hypothesis.seed(SEED)(PoolAndModel), settings=settings)


def test_threads_share_a_pool_and_every_look_at_it_adds_up() -> None:
    pool = BlockPool(16)
    over = threading.Event()
    owners = [threading.Lock() for _ in range(16)]

    def work() -> int:
        done = 0
        for turn in range(400):
            try:
                blocks = pool.allocate(1 + turn % 5)
            except OutOfMemory:
                continue
            for block in blocks:
                assert owners[block].acquire(blocking=False), f"block {block} was given twice"
            handle = pool.give(blocks, Handle())
            for block in blocks:
                owners[block].release()
            pool.free(blocks)
            handle.released = True
            done += 1
        return done

    def watch() -> int:
        looks = 0
        while not over.is_set():
            assert sum(pool.counts()) == 16
            looks += 1
        return looks

    with ThreadPoolExecutor(5) as threads:
        watching = threads.submit(watch)
        try:
            done = [worker.result(timeout=60) for worker in [threads.submit(work) for _ in range(4)]]
        finally:
            over.set()
        assert watching.result(timeout=10) > 0
    assert sum(done) > 100
    assert pool.counts() == (16, 0, 0)
