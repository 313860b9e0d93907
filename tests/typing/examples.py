"""Uses of the public names, checked by mypy and never run: each type is what a user relies on."""

from __future__ import annotations

from typing import Any

import numpy as np
from typing_extensions import assert_type

import kvlink
from kvlink import commands, errors

memory = kvlink.empty((2, 8, 4, 2, 8), "float32")
assert_type(memory, kvlink.Buffer)

tensor: Any = np.zeros((2, 8, 4, 2, 8), dtype="float32")
cache = kvlink.KVCache.from_tensors({"layers.0": tensor}, axes="kv block token head dim", block_tokens=4)
assert_type(cache, kvlink.KVCache)

apart = kvlink.KVCache.from_tensors(
    {"layers.0": {"k": tensor[0], "v": tensor[1]}}, axes="block token head dim", block_tokens=4, heads=range(2)
)
assert_type(apart, kvlink.KVCache)


def prefill(node: kvlink.Node) -> dict[str, Any]:
    offer = node.offer(blocks=[3, 9, -1], num_tokens=10, ttl_s=30, label="req-1", readers=1, payload=b"token")
    assert_type(offer, kvlink.Offer)
    assert_type(offer.released, bool)
    assert_type(offer.state, str)
    ticket: dict[str, Any] = offer.ticket
    return ticket


def decode(node: kvlink.Node, ticket: dict[str, Any]) -> bytes:
    pull = node.pull(ticket, blocks=np.array([7, 1, 2], dtype=np.int32), skip_tokens=4, deadline_s=10)
    assert_type(pull, kvlink.Pull)
    try:
        pull.wait(timeout_s=10)
    except errors.PeerLost as error:
        assert_type(error.failed, tuple[errors.FailedRange, ...])
        assert_type(error.valid_prefix_tokens, int)
        raise
    assert_type(pull.lane, str)
    assert_type(pull.bytes, int)
    assert_type(pull.phases_s, dict[str, float])
    return pull.payload


async def decode_later(node: kvlink.Node, ticket: dict[str, Any]) -> bytes:
    pull = node.pull(ticket, blocks={"full": [7, 1, 2]}, require="mapped")
    await pull
    pull.cancel()
    return pull.payload


def reserve(node: kvlink.Node) -> dict[str, Any]:
    slot = node.reserve(blocks=[7, 1, 2], num_tokens=10, ttl_s=30, label="req-2")
    assert_type(slot, kvlink.Slot)
    slot.announce("127.0.0.1:7000", key="room-17").wait(timeout_s=1)
    ticket: dict[str, Any] = slot.ticket
    return ticket


async def push(node: kvlink.Node, event: Any) -> None:
    expected = await node.expect("room-17", deadline_s=5)
    push = node.push(expected.ticket, blocks=[3, 9], deadline_s=10)
    assert_type(push, kvlink.Push)
    push.ready(layers=["layers.0"], tokens=range(0, 8), fence=event)
    push.add(blocks=np.array([4], dtype=np.int32))
    push.commit(payload=b"token")
    assert_type(await push, kvlink.Push)


def step(node: kvlink.Node, ticket: dict[str, Any]) -> list[str]:
    offer = commands.Offer(blocks=[1], ticket=ticket)
    node.submit([offer, commands.Pull(ticket=ticket, blocks=np.array([2], dtype=np.int32))], tag=7)
    node.submit([commands.Cancel(offer.id)])
    events = node.completions(max_events=16)
    assert_type(events, list[kvlink.Event])
    assert_type(events[0].error, kvlink.KvlinkError | None)
    return [event.id for event in events if event.kind == "released"]


with kvlink.Node(cache, name="decode-0", listen="127.0.0.1:0", secret=b"shared") as opened:
    assert_type(opened, kvlink.Node)
    assert_type(opened.fileno(), int)
    decode(opened, prefill(opened))
