"""Where no router carries the ticket: one node announces it under a key, the other expects it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.processes import wait_until
from helpers.tagged_pool import TaggedPool

import kvlink
from kvlink import errors
from kvlink.handoff import rendezvous

MakeNode = Callable[..., kvlink.Node]


@pytest.fixture
def make_node() -> Iterator[MakeNode]:
    pools: list[TaggedPool] = []

    def make(name: str, **options: Any) -> kvlink.Node:
        pools.append(TaggedPool(name=name, blocks=4, block_bytes=4096, copy_threads=1, **options))
        return pools[-1].node

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture
def pair(make_node: MakeNode) -> tuple[kvlink.Node, kvlink.Node]:
    return make_node("prefill"), make_node("decode")


def reserve(node: kvlink.Node, block: int = 0, **options: Any) -> kvlink.Slot:
    return node.reserve([block], num_tokens=1, **{"ttl_s": 10, **options})


def push(node: kvlink.Node, ticket: dict[str, Any]) -> None:
    pushed = node.push(ticket, [1], deadline_s=10)
    pushed.commit(b"met")
    pushed.wait(timeout_s=10)


@pytest.mark.parametrize("first", ["announce", "expect"])
def test_either_may_come_first(pair: Any, first: str) -> None:
    source, target = pair
    slot = reserve(target)
    if first == "expect":
        expected = source.expect("room-17", deadline_s=10)
        assert expected.poll() is False
        with pytest.raises(errors.InvalidArgument, match="it has not come yet"):
            _ = expected.ticket
        slot.announce(source.address, key="room-17").wait()
    else:
        slot.announce(source.address, key="room-17", deadline_s=10).wait(timeout_s=10)
        expected = source.expect("room-17", deadline_s=10)
        assert expected.poll()
    assert expected.wait(timeout_s=10).ticket == slot.ticket
    push(source, expected.ticket)
    assert slot.wait(timeout_s=10).payload == b"met"


def test_both_ends_can_be_awaited(pair: Any) -> None:
    source, target = pair
    slot = reserve(target)

    async def meet() -> dict[str, Any]:
        expected = source.expect("later", deadline_s=10)
        waiting = asyncio.ensure_future(_until(expected))
        await asyncio.sleep(0)
        await slot.announce(source.address, key="later")
        return (await waiting).ticket  # type: ignore[no-any-return]

    async def _until(expected: Any) -> Any:
        return await expected

    async def in_vain() -> None:
        await source.expect("never", deadline_s=0.02)

    assert asyncio.run(asyncio.wait_for(meet(), 10)) == slot.ticket
    with pytest.raises(errors.DeadlineExceeded, match="expect 'never' at prefill"):
        asyncio.run(asyncio.wait_for(in_vain(), 10))


def test_a_key_is_for_one_ticket_until_somebody_takes_it(pair: Any) -> None:
    source, target = pair
    one, two = reserve(target, 0), reserve(target, 1)
    one.announce(source.address, key="room").wait()
    one.announce(source.address, key="room").wait()  # the same again is no other
    with pytest.raises(errors.AlreadyClaimed, match="prefill has another ticket under the key 'room'"):
        two.announce(source.address, key="room").wait()
    assert source.expect("room", deadline_s=1).ticket == one.ticket
    two.announce(source.address, key="room").wait()
    assert source.expect("room", deadline_s=1).ticket == two.ticket


def test_a_key_is_expected_once_at_a_time_and_not_after_it_was_cancelled(pair: Any) -> None:
    source, target = pair
    expected = source.expect("room", deadline_s=10)
    with pytest.raises(errors.InvalidArgument, match="the key 'room' is expected already"):
        source.expect("room", deadline_s=10)
    expected.cancel()
    with pytest.raises(errors.Cancelled, match="room"):
        expected.wait(timeout_s=5)
    again = source.expect("room", deadline_s=0.01)
    with pytest.raises(errors.DeadlineExceeded, match="room"):
        again.wait(timeout_s=5)
    slot = reserve(target)
    slot.announce(source.address, key="room").wait()
    assert source.expect("room", deadline_s=1).ticket == slot.ticket


def test_a_ticket_that_nobody_takes_is_forgotten_with_its_reservation(pair: Any) -> None:
    source, target = pair
    slot = reserve(target, ttl_s=0.05)
    slot.announce(source.address, key="room").wait()
    with pytest.raises(errors.DeadlineExceeded):
        slot.wait(timeout_s=5)
    other = reserve(target, 1)

    def is_forgotten() -> bool:
        announcement = other.announce(source.address, key="room")
        with contextlib.suppress(errors.AlreadyClaimed):  # It counts from when it came.
            announcement.wait()
        return announcement.error is None

    wait_until(is_forgotten, timeout_s=5, what="the first ticket waits still")
    assert source.expect("room", deadline_s=1).ticket == other.ticket


def test_tables_are_bounded(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_MOST_KEYS", 1)
    source, target = pair
    reserve(target, 0).announce(source.address, key="a").wait()
    with pytest.raises(errors.Busy, match="prefill has 1 announced tickets"):
        reserve(target, 1).announce(source.address, key="b").wait()
    expected = source.expect("c", deadline_s=10)
    with pytest.raises(errors.Busy, match="1 keys are expected"):
        source.expect("d", deadline_s=10)
    del expected  # Nobody waits for it any more.
    assert source.expect("d", deadline_s=10).poll() is False


def test_what_cannot_be_is_refused(pair: Any) -> None:
    source, target = pair
    slot = reserve(target)
    for wrong in ({"address": "nowhere", "key": "a"}, {"address": source.address, "key": ""}):
        with pytest.raises(errors.InvalidArgument):
            slot.announce(**wrong)
    with pytest.raises(errors.TicketInvalid):
        target.announce({**slot.ticket, "num_tokens": 2}, source.address, key="a")
    with pytest.raises(errors.InvalidArgument, match="deadline_s"):
        source.expect("a", deadline_s=0)
    body = b"\xc1"
    with pytest.raises(errors.ProtocolError, match="not an announcement"):
        target._running.ask(source.address, "announce", body, deadline_s=5)


def test_closing_a_node_ends_what_it_expects_and_what_it_announces(pair: Any, make_node: MakeNode) -> None:
    source, target = pair
    expected = source.expect("room", deadline_s=60)
    failures: list[BaseException] = []

    def wait() -> None:
        try:
            expected.wait(timeout_s=20)
        except errors.KvlinkError as error:
            failures.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    source.close()
    thread.join(timeout=5)
    assert isinstance(failures[0], errors.Closed)
    with pytest.raises(errors.PeerUnreachable):
        reserve(target).announce(source.address, key="room").wait()
    with pytest.raises(errors.Closed):
        source.expect("room", deadline_s=1)
