"""Requests go where there is room, the book is always right, and failures give everything back."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from unit.fake_engine import FakeEngine

import kvlink
from kvlink import errors
from kvlink.handoff import running
from kvlink.scheduler import DecodeWorker, Placement, Scheduler


def sequence_of(ticket: dict[str, Any]) -> int:
    return int(ticket["id"].rpartition("-")[2])


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[kvlink.Node]:
    monkeypatch.setattr(running, "start_engine", lambda cache, epoch, settings, **_: FakeEngine(epoch=epoch))
    tensor = np.zeros((2, 64, 4, 2, 8), dtype="float32")
    cache = kvlink.KVCache.from_tensors({"layers.0": tensor}, axes="kv block token head dim", block_tokens=4)
    with kvlink.Node(cache, name="prefill-0", copy_threads=1) as made:
        yield made


class Decoder:
    """A decode worker that reads what it is told to, or does not."""

    def __init__(self, node: kvlink.Node, name: str, blocks: Any = 8, *, error: BaseException | None = None) -> None:
        self.tickets: list[dict[str, Any]] = []
        self._engine = FakeEngine.by_epoch[bytes.fromhex(node.epoch)]
        self._error = error
        self.read = True
        self.worker = DecodeWorker(name=name, free_blocks=blocks, hand_off=self.take)

    async def take(self, ticket: dict[str, Any]) -> str:
        await asyncio.sleep(0)
        if self._error is not None:
            raise self._error
        self.tickets.append(ticket)
        if self.read:
            self._engine.offers[sequence_of(ticket)].settle()
        return f"taken by {self.worker.name}"


def make(node: kvlink.Node, **blocks: Any) -> tuple[Scheduler, dict[str, Decoder]]:
    decoders = {name: Decoder(node, name, count) for name, count in blocks.items()}
    return Scheduler(node, workers=[decoder.worker for decoder in decoders.values()]), decoders


async def test_a_request_goes_to_the_worker_with_most_room_and_ties_are_fair(node: kvlink.Node) -> None:
    scheduler, _ = make(node, a=4, b=6, c=6)
    placed = [await scheduler.place(num_tokens=8) for _ in range(8)]
    assert [placement.worker for placement in placed] == ["b", "c", "a", "b", "c", "a", "b", "c"]
    with pytest.raises(errors.Busy, match="no decode worker got room for 8 tokens"):
        await scheduler.place(num_tokens=8)
    assert scheduler.free_blocks() == {name: {"full": 0} for name in "abc"}


async def test_a_handoff_reports_and_keeps_its_room_until_released(node: kvlink.Node) -> None:
    scheduler, decoders = make(node, a=8)
    placement = await scheduler.place(num_tokens=20)
    report = await scheduler.hand_off(placement, blocks=[5, 6], num_tokens=7, payload=b"x", label="req-1")
    assert (report.worker, report.reply) == ("a", "taken by a")
    (ticket,) = decoders["a"].tickets
    assert ticket["id"] == report.handoff
    assert ticket["num_tokens"] == 7
    assert scheduler.free_blocks() == {"a": {"full": 3}}
    for _ in range(2):
        scheduler.release(placement)
        assert scheduler.free_blocks() == {"a": {"full": 8}}
    with pytest.raises(errors.InvalidArgument, match="given back already"):
        await scheduler.hand_off(placement, blocks=[5, 6])


async def test_only_workers_of_a_directory_are_pushed_to(node: kvlink.Node) -> None:
    scheduler, _ = make(node, a=8)
    placement = await scheduler.place(num_tokens=4)
    with pytest.raises(errors.InvalidArgument, match="only workers of a directory"):
        await scheduler.begin(placement, blocks=[1], num_tokens=4)


async def test_a_worker_that_refuses_gives_the_room_back_and_the_offer_is_withdrawn(node: kvlink.Node) -> None:
    refusing = Decoder(node, "refusing", error=RuntimeError("no"))
    scheduler = Scheduler(node, workers=[refusing.worker])
    placement = await scheduler.place(num_tokens=4)
    with pytest.raises(RuntimeError, match="no"):
        await scheduler.hand_off(placement, blocks=[1])
    (offer,) = FakeEngine.by_epoch[bytes.fromhex(node.epoch)].offers.values()
    assert (offer.cancelled, offer.released) == (1, True)
    assert scheduler.free_blocks() == {"refusing": {"full": 8}}


async def test_an_offer_that_fails_does_not_wait_for_the_worker(node: kvlink.Node) -> None:
    async def never(ticket: dict[str, Any]) -> None:
        engine.offers[sequence_of(ticket)].settle("TicketExpired", "nobody came")
        await asyncio.sleep(3600)

    engine = FakeEngine.by_epoch[bytes.fromhex(node.epoch)]
    scheduler = Scheduler(node, workers=[DecodeWorker(name="asleep", free_blocks=8, hand_off=never)])
    placement = await scheduler.place(num_tokens=4)
    with pytest.raises(errors.TicketExpired, match="nobody came"):
        await asyncio.wait_for(scheduler.hand_off(placement, blocks=[1]), 5)
    assert scheduler.free_blocks() == {"asleep": {"full": 8}}


async def test_a_cancelled_hand_off_withdraws_its_offer_and_waits_for_the_release(node: kvlink.Node) -> None:
    scheduler, decoders = make(node, a=8)
    decoders["a"].read = False
    task = asyncio.ensure_future(scheduler.hand_off(await scheduler.place(num_tokens=4), blocks=[1]))
    while not decoders["a"].tickets:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (offer,) = FakeEngine.by_epoch[bytes.fromhex(node.epoch)].offers.values()
    assert offer.released
    assert scheduler.free_blocks() == {"a": {"full": 8}}


async def test_a_bad_offer_gives_the_room_back(node: kvlink.Node) -> None:
    scheduler, _ = make(node, a=8)
    placement = await scheduler.place(num_tokens=4)
    with pytest.raises(errors.InvalidArgument, match="999"):
        await scheduler.hand_off(placement, blocks=[999])
    assert scheduler.free_blocks() == {"a": {"full": 8}}


async def test_placing_waits_for_room_until_its_deadline(node: kvlink.Node) -> None:
    scheduler, _ = make(node, a=2)
    first = await scheduler.place(num_tokens=8)
    waiting = [asyncio.ensure_future(scheduler.place(num_tokens=8, deadline_s=20)) for _ in range(3)]
    with pytest.raises(errors.Busy, match="within 0.05 s"):
        await scheduler.place(num_tokens=8, deadline_s=0.05)
    threading.Thread(target=scheduler.release, args=(first,)).start()
    for left in range(3, 0, -1):
        done, waiting_set = await asyncio.wait(waiting, timeout=5, return_when=asyncio.FIRST_COMPLETED)
        assert (len(done), len(waiting_set)) == (1, left - 1)
        waiting = list(waiting_set)
        scheduler.release(done.pop().result())
    assert scheduler.free_blocks() == {"a": {"full": 2}}


async def test_what_can_never_fit_is_refused_at_once(node: kvlink.Node) -> None:
    scheduler, _ = make(node, a=2, b=3)
    with pytest.raises(errors.InvalidArgument, match="more than any decode worker has"):
        await scheduler.place(num_tokens=13, deadline_s=60)
    with pytest.raises(errors.InvalidArgument):
        await scheduler.place(num_tokens=-1)


async def test_each_worker_counts_in_its_own_blocks(node: kvlink.Node) -> None:
    """The node has blocks of 4 tokens; most room is meant in tokens."""
    workers = [
        DecodeWorker(name="same", free_blocks=5, hand_off=print),
        DecodeWorker(name="large", free_blocks=2, hand_off=print, block_tokens=64),
        DecodeWorker(name="small", free_blocks=9, hand_off=print, block_tokens={"full": 1}),
    ]
    scheduler = Scheduler(node, workers=workers)
    placed = [await scheduler.place(num_tokens=9) for _ in range(4)]
    assert [(one.worker, dict(one.blocks)) for one in placed] == [
        ("large", {"full": 1}),
        ("large", {"full": 1}),
        ("same", {"full": 3}),
        ("small", {"full": 9}),
    ]
    with pytest.raises(errors.InvalidArgument, match="more than any decode worker has"):
        await scheduler.place(num_tokens=129)


async def test_a_request_takes_one_slot_of_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "start_engine", lambda cache, epoch, settings, **_: FakeEngine(epoch=epoch))
    full = kvlink.KVCache.from_tensors(
        {"layers.0": np.zeros((2, 64, 4, 2, 8), "float32")}, axes="kv block token head dim", block_tokens=4
    )
    state = kvlink.KVCache.from_tensors({"layers.1": np.zeros((6, 8), "float32")}, axes="slot dim", group="state")
    with kvlink.Node(kvlink.KVCache.join(full, state), name="hybrid", copy_threads=1) as node:
        workers = [DecodeWorker(name="a", free_blocks={"full": 40, "state": 2}, hand_off=print, block_tokens=8)]
        scheduler = Scheduler(node, workers=workers)
        for _ in range(2):
            assert (await scheduler.place(num_tokens=30)).blocks == {"full": 4, "state": 1}
        with pytest.raises(errors.Busy):
            await scheduler.place(num_tokens=1)


async def test_the_book_never_promises_more_than_a_worker_has(node: kvlink.Node) -> None:
    rng = random.Random(7)
    capacity = {"a": 5, "b": 9, "c": 16}
    scheduler, _ = make(node, **capacity)
    live: list[Placement] = []
    for _ in range(2000):
        if live and rng.random() < 0.5:
            scheduler.release(live.pop(rng.randrange(len(live))))
        else:
            try:
                live.append(await scheduler.place(num_tokens=rng.randrange(40)))
            except errors.Busy:
                continue
        for name, free in scheduler.free_blocks().items():
            used = sum(placement.blocks["full"] for placement in live if placement.worker == name)
            assert free["full"] == capacity[name] - used >= 0


def test_the_blocking_forms_do_the_same(node: kvlink.Node) -> None:
    taken: list[Any] = []

    def take(ticket: dict[str, Any]) -> str:
        taken.append(ticket)
        FakeEngine.by_epoch[bytes.fromhex(node.epoch)].offers[sequence_of(ticket)].settle()
        return "by a plain function"

    scheduler = Scheduler(node, workers=[DecodeWorker(name="a", free_blocks={"full": 8}, hand_off=take)])
    placement = scheduler.place_blocking(num_tokens=4)
    assert scheduler.hand_off_blocking(placement, blocks=[1]).reply == "by a plain function"
    assert len(taken) == 1


async def test_a_blocking_form_inside_a_loop_says_what_to_do(node: kvlink.Node) -> None:
    scheduler, _ = make(node, a=8)
    with pytest.raises(errors.InvalidArgument, match="await the other one"):
        scheduler.place_blocking(num_tokens=4)


@pytest.mark.parametrize(
    "workers",
    [
        lambda node: [],
        lambda node: [Decoder(node, "a").worker] * 2,
        lambda node: [Decoder(node, "a", {"sliding": 3}).worker],
        lambda node: [Decoder(node, "a", -1).worker],
        lambda node: [Decoder(node, "a", 1.5).worker],
        lambda node: [DecodeWorker(name="a", free_blocks=1, hand_off=print, block_tokens=0)],
        lambda node: [DecodeWorker(name="a", free_blocks=1, hand_off=print, block_tokens={"sliding": 16})],
    ],
    ids=["none", "twice", "groups", "negative", "fraction", "empty-blocks", "groups-of-blocks"],
)
def test_workers_that_cannot_be_are_refused(node: kvlink.Node, workers: Callable[[Any], Any]) -> None:
    with pytest.raises(errors.ConfigError):
        Scheduler(node, workers=workers(node))
