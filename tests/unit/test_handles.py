"""A handle tells how its handoff stands, blocks no longer than asked, and fails with the leaf it should."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from unit.fake_engine import FakeEngine, FakeHandoff

import kvlink
from kvlink import errors
from kvlink.handoff import running


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[kvlink.Node]:
    monkeypatch.setattr(running, "start_engine", lambda cache, epoch, settings, **_: FakeEngine(epoch=epoch))
    tensor = np.zeros((2, 8, 4, 2, 8), dtype="float32")
    cache = kvlink.KVCache.from_tensors({"layers.0": tensor}, axes="kv block token head dim", block_tokens=4)
    with kvlink.Node(cache, name="prefill-0", copy_threads=1) as made:
        yield made


def make(node: kvlink.Node, **options: Any) -> tuple[kvlink.Offer, FakeHandoff]:
    offer = node.offer([1], num_tokens=1, **options)
    return offer, FakeEngine.by_epoch[bytes.fromhex(node.epoch)].offers[int(offer.id.rpartition("-")[2])]


def test_a_handle_begins_without_an_outcome(node: kvlink.Node) -> None:
    offer, _ = make(node, label="req-1")
    assert (offer.outcome, offer.error, offer.released, offer.state, offer.label) == (
        None,
        None,
        False,
        "offered",
        "req-1",
    )
    assert offer.poll() is False
    assert offer.failed == ()
    assert "offered" in repr(offer)
    with pytest.raises(errors.InvalidArgument, match="no outcome yet"):
        _ = kvlink.Pull(offer._handoff, node, title="pull 7", lasts_s=1).payload


def test_a_ticket_is_a_copy_that_json_takes(node: kvlink.Node) -> None:
    offer, _ = make(node)
    ticket = offer.ticket
    assert json.loads(json.dumps(ticket)) == ticket
    ticket["groups"].append("x")
    ticket["sources"].clear()
    assert offer.ticket["groups"] == ["full"]
    assert [source["epoch"] for source in offer.ticket["sources"]] == [node.epoch]


def test_waiting_is_bounded_and_leaves_the_handoff_alone(node: kvlink.Node) -> None:
    offer, native = make(node, ttl_s=50)
    for timeout_s in (0.0, 0.05, 0.3):
        began = time.monotonic()
        with pytest.raises(errors.DeadlineExceeded, match="it is offered still"):
            offer.wait(timeout_s=timeout_s)
        assert timeout_s <= time.monotonic() - began < timeout_s + 0.5
        assert offer.wait_released(timeout_s=timeout_s) is False
    assert native.cancelled == 0
    threading.Timer(0.05, native.settle).start()
    assert offer.wait(timeout_s=5) is offer
    assert offer.wait_released(timeout_s=5) is True


def test_a_failure_is_its_leaf_with_what_is_still_right(node: kvlink.Node) -> None:
    offer, native = make(node)
    native.failed = [("full", "layers.0", "k", 2, 4, 4, 8)]
    native.valid_prefix_tokens = 4
    native.settle("PeerLost", "offer 7: connection reset", released=False)
    for use in (offer.poll, offer.wait, lambda: asyncio.run(_awaited(offer))):
        with pytest.raises(errors.PeerLost, match="connection reset") as caught:
            use()
        assert caught.value.failed == (("full", "layers.0", "k", 2, 4, 4, 8),)
        assert caught.value.failed[0].first_head == 2
        assert caught.value.failed[0].end_token == 8
        assert caught.value.valid_prefix_tokens == 4
        assert isinstance(caught.value, ConnectionError)
    assert offer.released is False
    assert isinstance(offer.error, errors.PeerLost)


async def _awaited(handle: Any) -> Any:
    return await handle


async def test_awaiting_ends_with_the_outcome_or_the_release(node: kvlink.Node) -> None:
    offer, native = make(node)
    threading.Timer(0.05, native.settle, kwargs={"released": False}).start()
    assert await asyncio.wait_for(_awaited(offer), 5) is offer
    threading.Timer(0.05, native.settle).start()
    await asyncio.wait_for(offer.until_released(), 5)
    assert await offer is offer


async def test_cancelling_the_task_does_not_cancel_the_handoff(node: kvlink.Node) -> None:
    offer, native = make(node)
    with pytest.raises((asyncio.TimeoutError, TimeoutError)):
        await asyncio.wait_for(_awaited(offer), 0.05)
    assert (native.cancelled, offer.outcome) == (0, None)


def test_cancelling_is_harmless_at_any_time(node: kvlink.Node) -> None:
    offer, _ = make(node)
    offer.cancel()
    offer.cancel()
    with pytest.raises(errors.Cancelled):
        offer.wait(timeout_s=1)
    node.close()
    offer.cancel()


async def test_closing_the_node_wakes_those_who_await(node: kvlink.Node) -> None:
    offer, _ = make(node)
    waiting = asyncio.ensure_future(_awaited(offer))
    await asyncio.sleep(0)
    threading.Thread(target=node.close).start()
    with pytest.raises(errors.Closed):
        await asyncio.wait_for(waiting, 5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_tokens": -1}, "num_tokens is -1"),
        ({"num_tokens": 1.0}, "num_tokens must be a whole number"),
        ({"num_tokens": True}, "num_tokens"),
        ({"readers": 0}, "readers"),
        ({"ttl_s": 0}, "ttl_s"),
        ({"ttl_s": float("nan")}, "ttl_s"),
        ({"ttl_s": 1e9}, "ttl_s"),
        ({"ttl_s": "soon"}, "ttl_s"),
        ({"label": "x" * 300}, "label"),
        ({"label": 7}, "label"),
        ({"payload": "text"}, "payload"),
        ({"payload": 7}, "payload"),
        ({"payload": bytes(2 << 20)}, "limits.payload_bytes"),
    ],
)
def test_an_offer_that_cannot_be_is_refused_by_name(node: kvlink.Node, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=said):
        node.offer([1], **{"num_tokens": 1, **changes})


def test_zero_tokens_and_any_bytes_like_payload_are_fine(node: kvlink.Node) -> None:
    for payload in (b"x", bytearray(b"x"), memoryview(b"x"), np.frombuffer(b"x", dtype=np.uint8)):
        node.offer([], num_tokens=np.int64(0), payload=payload)


def test_a_pull_of_other_groups_is_refused(node: kvlink.Node) -> None:
    """Others than those of this cache may be offered too: a pipeline stage has some of them only."""
    from kvlink.handoff.ticket import TicketSource, make_ticket

    sources = [TicketSource(name="x", address="127.0.0.1:1", epoch=bytes(16).hex())]
    fields: dict[str, Any] = {"epoch": bytes(16), "sequence": 1, "readers": 1, "ttl_ms": 1, "sources": sources}
    with pytest.raises(errors.NotOffered, match="full"):
        node.pull(make_ticket(**fields, num_tokens=1, groups=["sliding"]), [1])
    node.pull(make_ticket(**fields, num_tokens=1, groups=["full", "sliding"]), [1]).cancel()


@pytest.mark.parametrize(("require", "error"), [("pigeon", errors.InvalidArgument), ("get", errors.LaneUnavailable)])
def test_a_lane_that_this_node_may_not_use_is_refused(node: kvlink.Node, require: str, error: Any) -> None:
    target = kvlink.Node(node.cache, name="only-mapped", lanes=["mapped"], copy_threads=1)
    with target, pytest.raises(error, match=require):
        target.pull(node.offer([1], num_tokens=1).ticket, [1], require=require)
