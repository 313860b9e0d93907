"""Decode workers that take requests by themselves, and a scheduler that goes from one to the next."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
from helpers.patterns import Geometry, Placement
from helpers.processes import spawn_worker, wait_until
from helpers.scheduled import BLOCKS, TOKENS, Decoder, Memory, Prefill
from unit.test_directory import entry

import kvlink
from kvlink import Limits, errors
from kvlink.directory import StaticDirectory
from kvlink.handoff.asking import ask
from kvlink.scheduler import Arrival, DecodeService, PoolAllocator
from kvlink.scheduler.messages import RESERVE, WITHDRAW, Reserve, Reserved, Withdraw, pack, sendable, unpack
from kvlink.wire import MOST_ASKED_BYTES


@pytest.fixture
def directory() -> StaticDirectory:
    return StaticDirectory()


@pytest.fixture
def decoder(directory: StaticDirectory) -> Iterator[Callable[..., Decoder]]:
    made: list[Decoder] = []

    def make(name: str, **options: Any) -> Decoder:
        made.append(Decoder(name, options.pop("directory", directory), **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def prefill(directory: StaticDirectory) -> Iterator[Prefill]:
    made = Prefill(directory)
    yield made
    made.close()


async def test_a_request_arrives_with_its_bytes_and_its_blocks_come_back(
    prefill: Prefill, decoder: Callable[..., Decoder]
) -> None:
    worker = decoder("decode-0")
    report = await prefill.hand_off(3, 9, 4, room=5, payload=b"first", label="req-1")
    arrival = worker.arrived.get(timeout=5)
    assert (arrival.label, arrival.payload, arrival.source) == ("req-1", b"first", "prefill-0")
    assert (arrival.num_tokens, arrival.room_tokens) == (12, 17)
    assert len(arrival.blocks["full"]) == 5
    assert worker.memory.values(arrival.blocks["full"][:3]) == [4, 10, 5]
    assert (report.worker, report.handoff, report.tried) == ("decode-0", arrival.handoff, ())
    assert worker.service.entry().load == 1
    assert prefill.scheduler.free_blocks() == {"decode-0": {"full": BLOCKS - 5}}
    for _ in range(2):
        worker.service.finish(arrival)
    assert worker.pool.counts() == (BLOCKS, 0, 0)
    assert prefill.scheduler.free_blocks() == {"decode-0": {"full": BLOCKS}}
    assert worker.service.counters() == {"accepted": 1, "refused": 0, "arrived": 1, "failed": 0}


async def test_workers_come_and_go_while_requests_wait(prefill: Prefill, decoder: Callable[..., Decoder]) -> None:
    waiting = asyncio.ensure_future(prefill.hand_off(1))
    await asyncio.sleep(0)  # lets the task begin
    first = decoder("decode-0")
    assert (await waiting).worker == "decode-0"
    placement = await prefill.scheduler.place(num_tokens=4)
    first.service.close()
    second = decoder("decode-1")
    report = await prefill.scheduler.hand_off(placement, blocks=[1], ttl_s=10)
    assert report.worker == "decode-1"
    assert [(one.worker, type(one.error)) for one in report.tried] == [("decode-0", errors.PeerLost)]
    assert second.memory.values(second.arrived.get(timeout=5).blocks["full"]) == [2]


async def test_who_has_less_than_the_directory_says_refuses_and_another_takes_it(
    prefill: Prefill, decoder: Callable[..., Decoder]
) -> None:
    full, other = decoder("full"), decoder("other", blocks=BLOCKS // 2)
    full.pool.allocate(BLOCKS)  # by the engine itself, which has not told
    report = await prefill.hand_off(5)
    assert report.worker == "other"
    assert [(one.worker, type(one.error)) for one in report.tried] == [("full", errors.Busy)]
    assert prefill.scheduler.free_blocks()["full"] == {"full": 0}
    assert other.memory.values(other.arrived.get(timeout=5).blocks["full"]) == [6]
    assert full.service.counters()["refused"] == 1


@pytest.mark.parametrize("fault", ["gone", "stranger", "layout"])
async def test_a_worker_that_cannot_take_it_is_left_out(
    prefill: Prefill, directory: StaticDirectory, decoder: Callable[..., Decoder], fault: str
) -> None:
    if fault == "layout":
        wrong = decoder("wrong", blocks=2 * BLOCKS, heads=4)
    else:
        wrong = decoder("wrong", blocks=2 * BLOCKS, directory=None)
        listed = wrong.service.entry()
        if fault == "gone":
            wrong.close()
        directory.put(entry(7, address=listed.address) if fault == "stranger" else listed)
    right = decoder("right", blocks=8 if fault == "stranger" else BLOCKS)
    report = await prefill.hand_off(2, 5)
    assert report.worker == "right"
    assert len(report.tried) == 1
    assert right.memory.values(right.arrived.get(timeout=5).blocks["full"]) == [3, 6]
    assert right.arrived.empty()
    assert prefill.node.holds()["shared"] == 0
    if fault != "layout":  # it is left out for a while
        assert (await prefill.hand_off(1)).tried == ()
    if fault == "layout":
        until_released(wrong)
        assert wrong.pool.counts() == (2 * BLOCKS, 0, 0)
        assert wrong.service.counters()["failed"] == 1


async def test_room_that_nobody_has_told_of_is_asked_for(
    prefill: Prefill, directory: StaticDirectory, decoder: Callable[..., Decoder]
) -> None:
    worker = decoder("silent", directory=None)
    blocks = worker.pool.allocate(BLOCKS)
    directory.put(worker.service.entry())
    waiting = asyncio.ensure_future(prefill.hand_off(1))
    await asyncio.sleep(0.05)  # nothing happens that one could wait for: nobody has room
    assert not waiting.done()
    worker.pool.free(blocks)
    assert (await asyncio.wait_for(waiting, 5)).worker == "silent"


async def test_what_nobody_takes_fails_by_its_deadline_and_says_who_was_asked(
    prefill: Prefill, decoder: Callable[..., Decoder]
) -> None:
    decoder("a", heads=4)
    decoder("b", heads=1)
    with pytest.raises(errors.KvlinkError, match=r"no decode worker took it in time\. Tried (a|b) after .*; (a|b) "):
        await asyncio.wait_for(prefill.hand_off(1, ttl_s=1.0), 5)
    assert prefill.node.holds() == {"shared": 0, "exclusive": 0, "quarantined": 0, "handoffs": 0}


async def test_a_prefill_that_still_runs_is_pushed_layer_by_layer(
    prefill: Prefill, decoder: Callable[..., Decoder]
) -> None:
    full, worker = decoder("full", blocks=2 * BLOCKS), decoder("decode-0")
    full.pool.allocate(2 * BLOCKS)
    prefill.memory.tensor[:, 7] = 8
    placement = await prefill.scheduler.place(num_tokens=2 * TOKENS + 3)
    push = await prefill.scheduler.begin(placement, blocks=[7], num_tokens=2 * TOKENS, ttl_s=10, label="req-1")
    assert push.target == "decode-0"  # the other one has refused
    push.ready(tokens=range(TOKENS))
    prefill.memory.tensor[:, 2] = 3
    push.add(blocks=[2])
    push.commit(payload=b"first")
    await push
    arrival = worker.arrived.get(timeout=5)
    assert (arrival.label, arrival.payload, arrival.handoff) == ("req-1", b"first", push.id)
    assert worker.memory.values(arrival.blocks["full"][:2]) == [8, 3]
    with pytest.raises(errors.InvalidArgument, match="given back"):
        await prefill.scheduler.begin(placement, blocks=[7], num_tokens=TOKENS)


async def test_bad_arguments_are_the_callers_and_go_nowhere(prefill: Prefill, decoder: Callable[..., Decoder]) -> None:
    worker = decoder("decode-0")
    placement = await prefill.scheduler.place(num_tokens=4)
    with pytest.raises(errors.InvalidArgument, match="999"):
        await prefill.scheduler.hand_off(placement, blocks=[999])
    with pytest.raises(errors.InvalidArgument, match="given back"):
        await prefill.scheduler.hand_off(placement, blocks=[1])
    with pytest.raises(errors.InvalidArgument, match="num_tokens is 5"):
        await prefill.scheduler.hand_off(await prefill.scheduler.place(num_tokens=4), blocks=[1, 2], num_tokens=5)
    until_released(worker)
    assert worker.pool.counts() == (BLOCKS, 0, 0)


async def test_a_cancelled_hand_off_leaves_nothing_on_either_side(
    prefill: Prefill, decoder: Callable[..., Decoder]
) -> None:
    worker = decoder("decode-0")
    for delay_s in (0.0, 0.001, 0.002, 0.004, 0.01):
        task = asyncio.ensure_future(prefill.hand_off(1, 2))
        await asyncio.sleep(delay_s)  # the moment of the cancel is what varies
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=5)
        assert done
        assert prefill.node.holds()["shared"] == 0
    until_released(worker)
    counts = worker.service.counters()
    assert counts["accepted"] == counts["arrived"] + counts["failed"]
    assert worker.pool.counts().free == BLOCKS - 2 * counts["arrived"]


def until_released(worker: Decoder) -> None:
    worker.service.close()  # goes on until everything is released, which is soon
    assert worker.node.holds()["exclusive"] == 0


def put(prefill: Prefill, worker: Decoder, kind: str, message: Any) -> bytes:
    return ask(prefill.node, worker.node.address, kind, body=pack(message), deadline_s=5, epoch=worker.node.epoch)


def test_a_question_that_is_asked_again_gets_the_same_answer_and_is_done_once(
    prefill: Prefill, decoder: Callable[..., Decoder]
) -> None:
    worker = decoder("decode-0")
    question = Reserve(request="one", num_tokens=4, room_tokens=8, ttl_ms=5000)
    answers: list[Reserved] = []

    def reserve() -> None:
        answers.append(unpack(put(prefill, worker, RESERVE, question), Reserved))

    threads = [threading.Thread(target=reserve) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert answers[0].ticket is not None
    push = prefill.node.push(answers[0].ticket, blocks=[1])
    push.commit()
    push.wait(timeout_s=5)
    worker.arrived.get(timeout=5)
    reserve()
    assert [one.ticket for one in answers] == [answers[0].ticket] * 5
    assert {one.free_blocks["full"] for one in answers} == {BLOCKS - 2}
    assert worker.arrived.empty()
    assert worker.service.counters()["accepted"] == 1


@pytest.mark.parametrize("order", ["reserved", "withdrawn"])
def test_what_is_withdrawn_takes_no_blocks_whichever_comes_first(
    prefill: Prefill, decoder: Callable[..., Decoder], order: str
) -> None:
    worker = decoder("decode-0")
    reserve, withdraw = Reserve(request="one", num_tokens=4, room_tokens=8, ttl_ms=60_000), Withdraw(request="one")
    if order == "reserved":
        assert unpack(put(prefill, worker, RESERVE, reserve), Reserved).ticket is not None
        assert put(prefill, worker, WITHDRAW, withdraw) == b""
    else:
        put(prefill, worker, WITHDRAW, withdraw)
        assert unpack(put(prefill, worker, RESERVE, reserve), Reserved).ticket is None
    until_released(worker)
    assert worker.pool.counts() == (BLOCKS, 0, 0)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"", errors.ProtocolError),
        (b"\xc1" * 100, errors.ProtocolError),
        (pack(Reserve(request="x", num_tokens=5, room_tokens=4, ttl_ms=1)), errors.InvalidArgument),
    ],
    ids=["empty", "garbage", "room"],
)
def test_hostile_questions_take_no_blocks(
    prefill: Prefill, decoder: Callable[..., Decoder], body: bytes, error: type[Exception]
) -> None:
    worker = decoder("decode-0")
    with pytest.raises(error):
        ask(prefill.node, worker.node.address, RESERVE, body=body, deadline_s=5)
    assert worker.pool.counts() == (BLOCKS, 0, 0)


async def test_a_service_takes_no_more_requests_than_it_was_told(
    prefill: Prefill, decoder: Callable[..., Decoder]
) -> None:
    decoder("one", most_requests=1)
    await prefill.hand_off(1)
    with pytest.raises(errors.Busy):
        await prefill.hand_off(2, ttl_s=0.3)


def test_a_worker_that_is_drained_or_closed_leaves_the_directory(
    directory: StaticDirectory, decoder: Callable[..., Decoder]
) -> None:
    worker = decoder("decode-0")
    assert [one.name for one in directory.listing().workers.values()] == ["decode-0"]
    worker.node.drain(deadline_s=1)
    with pytest.raises(errors.NotReady, match="draining"):
        worker.service.entry()
    worker.service.close()
    assert not directory.listing().workers


def test_an_allocator_of_other_groups_is_refused(decoder: Callable[..., Decoder]) -> None:
    worker = decoder("decode-0")
    for options in ({"allocator": PoolAllocator({"sliding": worker.pool})}, {"most_requests": 0}):
        chosen: Mapping[str, Any] = {"allocator": PoolAllocator({"full": worker.pool}), **options}
        with pytest.raises(errors.ConfigError):
            DecodeService(worker.node, on_ready=print, **chosen)


def test_the_blocking_forms_hand_off_too(prefill: Prefill, decoder: Callable[..., Decoder]) -> None:
    worker = decoder("decode-0")
    prefill.memory.tensor[:, 6] = 7
    placement = prefill.scheduler.place_blocking(num_tokens=4)
    assert prefill.scheduler.hand_off_blocking(placement, blocks=[6]).worker == "decode-0"
    assert worker.memory.values(worker.arrived.get(timeout=5).blocks["full"]) == [7]


@pytest.mark.expects_warnings
async def test_an_engine_that_fails_to_take_a_request_over_loses_no_blocks(
    prefill: Prefill, directory: StaticDirectory
) -> None:
    memory, pool = Memory(), kvlink.BlockPool(BLOCKS)
    was_called = threading.Event()

    def fail(arrival: Arrival) -> None:
        was_called.set()
        raise RuntimeError("the engine is broken")

    with kvlink.Node(memory.cache, name="broken", copy_threads=1) as node:
        service = DecodeService(node, PoolAllocator({"full": pool}), on_ready=fail, directory=directory)
        assert (await prefill.hand_off(1)).worker == "broken"
        assert was_called.wait(timeout=5)
        service.close()
        assert pool.counts() == (BLOCKS, 0, 0)
        assert service.counters()["arrived"] == 1


class Remembering(PoolAllocator):
    """An allocator that keeps the block of each hash, for good."""

    def __init__(self, pool: kvlink.BlockPool) -> None:
        super().__init__({"full": pool})
        self.pool = pool
        self.known: dict[Any, int] = {}

    def remember(self, prefix_hashes: Sequence[Any], blocks: Sequence[int]) -> None:
        self.known.update(zip(prefix_hashes, blocks, strict=True))

    def try_allocate_after(
        self, counts: Mapping[str, int], prefix_hashes: Sequence[Any]
    ) -> tuple[Mapping[str, Sequence[int]], int] | None:
        kept = [self.known[one] for one in itertools.takewhile(self.known.__contains__, prefix_hashes)]
        fresh = self.try_allocate({"full": max(0, counts["full"] - len(kept))})
        return None if fresh is None else ({"full": [*kept, *fresh["full"]]}, TOKENS * len(kept))

    def free(self, blocks: Mapping[str, Sequence[int]]) -> None:
        super().free({"full": [block for block in blocks["full"] if block not in self.known.values()]})


async def test_what_a_worker_has_of_a_prefix_is_not_pushed_again(
    prefill: Prefill, directory: StaticDirectory, decoder: Callable[..., Decoder]
) -> None:
    memory, pool = Memory(), kvlink.BlockPool(BLOCKS)
    allocator, arrived = Remembering(pool), queue.Queue[Arrival]()
    hashes = [1 << 63, b"second", -3, 4]
    with kvlink.Node(memory.cache, name="remembers", copy_threads=1) as node:
        service = DecodeService(node, allocator, on_ready=arrived.put, directory=directory)
        for block in range(5):
            prefill.memory.tensor[:, block] = block + 1

        async def hand_off(prefix_hashes: Sequence[Any], *, room: int = 3) -> tuple[Any, Arrival]:
            placement = await prefill.scheduler.place(num_tokens=4 * TOKENS + room, prefix_hashes=prefix_hashes)
            report = await prefill.scheduler.hand_off(
                placement, blocks=[0, 1, 2, 3], num_tokens=4 * TOKENS, ttl_s=10, payload=b"first"
            )
            return report, arrived.get(timeout=5)

        report, arrival = await hand_off(hashes)
        assert (report.skipped_tokens, arrival.cached_tokens) == (0, 0)
        whole = node.counters()["bytes_pulled"]
        kept = arrival.blocks["full"][:2]
        allocator.remember(hashes[:2], kept)
        service.finish(arrival)
        memory.tensor[:, kept[0]] = 100  # so that one sees that nobody writes it again
        report, arrival = await hand_off(hashes)
        assert (report.skipped_tokens, arrival.cached_tokens) == (2 * TOKENS, 2 * TOKENS)
        assert (arrival.num_tokens, arrival.payload) == (4 * TOKENS, b"first")
        assert list(arrival.blocks["full"][:2]) == list(kept)
        assert memory.values(arrival.blocks["full"][:4]) == [100, 2, 3, 4]
        assert node.counters()["bytes_pulled"] - whole == whole // 2
        other = await prefill.scheduler.place(num_tokens=4 * TOKENS, prefix_hashes=hashes)
        push = await prefill.scheduler.begin(other, blocks=[0, 1, 2, 3], num_tokens=4 * TOKENS)
        assert push.skip_tokens == 2 * TOKENS  # while the request before lives, with the same blocks
        push.commit()
        await push
        for each in (arrival, arrived.get(timeout=5)):
            service.finish(each)
        # Of a prefix that goes on differently, as much as is the same; a request that is all here moves nothing.
        report, arrival = await hand_off([hashes[0], b"other", -3])
        assert report.skipped_tokens == TOKENS
        service.finish(arrival)
        allocator.remember([b"a", b"b", b"c", b"d", b"e"], [*kept, *arrival.blocks["full"][2:4], 31])
        before = node.counters()["bytes_pulled"]
        report, arrival = await hand_off([b"a", b"b", b"c", b"d", b"e"])
        assert (report.skipped_tokens, node.counters()["bytes_pulled"]) == (4 * TOKENS, before)
        service.close()


def test_hashes_that_cannot_be_sent_end_the_prefix() -> None:
    assert sendable([1, b"two", (3,), 4]) == [1, b"two"]
    assert sendable([1, True]) == [1]
    for wrong in (1 << 64, "three", b"x" * 300):
        assert sendable([1, wrong, 2]) == [1]
    many = sendable(range(1 << 20))
    question = Reserve(request="x", num_tokens=1, room_tokens=1, ttl_ms=1, prefix_hashes=many)
    assert 20_000 < len(many) < 40_000
    assert len(pack(question)) < MOST_ASKED_BYTES
    assert unpack(pack(question), Reserve) == question


def test_a_prefill_worker_that_dies_before_it_pushes_is_noticed_in_a_second(decoder: Callable[..., Decoder]) -> None:
    worker = decoder("decode-0")
    asker = spawn_worker("helpers.node_worker:NodeWorker")
    with contextlib.closing(asker):
        asker.call("open", Geometry(layers=("layers.0",), heads=2, head_dim=8), Placement(), seed=1)
        question = Reserve(request="one", num_tokens=4, room_tokens=8, ttl_ms=600_000)
        reserved = unpack(asker.call("put", worker.node.address, RESERVE, pack(question)), Reserved)
        assert reserved.ticket is not None
        wait_until(lambda: bool(worker.node.peers()), timeout_s=5, what="the two are connected")
        assert worker.pool.num_free == BLOCKS - 2
        asker.kill()
        wait_until(lambda: worker.pool.num_free == BLOCKS, timeout_s=1, what="its blocks are free again")
    assert worker.service.counters() == {"accepted": 1, "refused": 0, "arrived": 0, "failed": 1}


def test_limits_are_told(decoder: Callable[..., Decoder]) -> None:
    worker = decoder("decode-0")
    assert worker.service.entry().window_bytes == Limits().node_window_bytes
