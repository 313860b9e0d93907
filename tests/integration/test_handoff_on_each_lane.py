"""Two processes and real UCX: what a handoff promises, on each lane."""

from __future__ import annotations

import json

import pytest
from helpers.patterns import APART_AXES, Geometry, Placement, Request
from helpers.processes import Pair

from kvlink import errors

SCATTERED = Request(source_blocks=(6, 1, 4), target_blocks=(0, 7, 3), num_tokens=11)


def test_every_byte_lands_and_the_last_block_stays_partial(pair: Pair) -> None:
    pair.open()
    taken = pair.hand_over(SCATTERED)
    assert taken.lane == pair.lane.lane
    assert taken.nbytes == 11 * 2 * 2 * 2 * 8 * 4  # tokens, layers, components, heads, dims, bytes
    assert {"claim", "move", "confirm", "total"} <= taken.phases_s.keys()
    assert not any(pair.holds())


def test_the_payload_travels_with_the_cache(pair: Pair) -> None:
    pair.open()
    for payload in (b"", b"\x00", bytes(range(256)) * 8):
        assert pair.hand_over(SCATTERED, payload=payload).payload == payload


@pytest.mark.parametrize(
    ("source_blocks", "target_blocks"),
    [((6, 1, 4), (-1, 7, 3)), ((6, -1, 4), (0, -1, 3)), ((-1, -1, 4), (-1, -1, 3)), ((6, 1, 4), (-1, -1, -1))],
    ids=["first-hole", "hole-on-both-sides", "only-the-tail", "nothing-wanted"],
)
def test_holes_are_neither_read_nor_written(
    pair: Pair, source_blocks: tuple[int, ...], target_blocks: tuple[int, ...]
) -> None:
    pair.open()
    pair.hand_over(Request(source_blocks=source_blocks, target_blocks=target_blocks, num_tokens=11))


def test_a_source_hole_that_the_target_wants_is_refused_before_a_byte_moves(pair: Pair) -> None:
    pair.open()
    offered, ticket = pair.offer(Request(source_blocks=(6, -1, 4), target_blocks=(), num_tokens=11))
    pulled = pair.pull(ticket, SCATTERED)
    with pytest.raises(errors.NotOffered):
        pair.target.call("wait", pulled)
    pair.target.call("wait_released", pulled)
    pair.verify()
    pair.source.call("cancel", offered)
    pair.source.call("wait_released", offered)
    assert not any(pair.holds())


@pytest.mark.parametrize("skip_tokens", [0, 1, 3, 4, 5, 8, 10, 11])
def test_a_prefix_that_the_target_has_is_not_touched(pair: Pair, skip_tokens: int) -> None:
    pair.open()
    taken = pair.hand_over(
        Request(source_blocks=(6, 1, 4), target_blocks=(0, 7, 3), num_tokens=11, skip_tokens=skip_tokens)
    )
    assert taken.nbytes == (11 - skip_tokens) * 256


def test_a_skipped_prefix_needs_no_blocks_on_the_target(pair: Pair) -> None:
    pair.open()
    pair.hand_over(Request(source_blocks=(6, 1, 4), target_blocks=(-1, -1, 3), num_tokens=11, skip_tokens=8))


@pytest.mark.parametrize("blocks", [(), (2,)], ids=["no-blocks", "a-spare-block"])
def test_a_handoff_of_no_tokens_completes(pair: Pair, blocks: tuple[int, ...]) -> None:
    pair.open()
    taken = pair.hand_over(Request(source_blocks=blocks, target_blocks=blocks, num_tokens=0), payload=b"only this")
    assert (taken.nbytes, taken.payload) == (0, b"only this")


def test_tables_may_be_longer_than_the_sequence(pair: Pair) -> None:
    pair.open()
    pair.hand_over(Request(source_blocks=(6, 1, 4, 5, 2), target_blocks=(0, 7, 3, 5), num_tokens=11))


def test_layouts_that_order_their_axes_differently_agree_on_every_element(pair: Pair) -> None:
    memory = pair.lane.memory
    geometry = Geometry(layers=("a", "b", "c"), heads=3, head_dim=6, dtype="uint16")
    fused = Placement(
        memory=memory, block_tokens=5, axes=("block", "kv", "head", "token", "dim"), padding=(0, 1, 0, 0, 2)
    )
    apart = Placement(
        memory=memory, block_tokens=5, num_blocks=11, axes=("head", "block", "token", "dim"), layer_order=(2, 0, 1)
    )
    pair.open(geometry, source=fused, target=apart)
    pair.hand_over(Request(source_blocks=(7, 0, 3), target_blocks=(10, 2, 5), num_tokens=13))


@pytest.mark.parametrize(("ours", "theirs"), [(4, 8), (6, 4), (3, 16), (16, 1)])
def test_blocks_of_different_sizes_agree_on_every_token(pair: Pair, ours: int, theirs: int) -> None:
    memory = pair.lane.memory
    pair.open(
        source=Placement(memory=memory, block_tokens=ours, num_blocks=40),
        target=Placement(memory=memory, block_tokens=theirs, num_blocks=40),
    )
    source_blocks = tuple(range(30, 30 - -(-23 // ours), -1))
    target_blocks = tuple(range(3, 3 + -(-23 // theirs)))
    pair.hand_over(Request(source_blocks=source_blocks, target_blocks=target_blocks, num_tokens=23, skip_tokens=5))


def test_layers_that_are_slices_of_one_tensor_are_moved_alone(pair: Pair) -> None:
    memory = pair.lane.memory
    sliced = Placement(memory=memory, axes=APART_AXES, interleaved=True, layer_position=1, padding=(1, 1))
    pair.open(source=sliced, target=sliced)
    pair.hand_over(SCATTERED)


def test_several_readers_each_get_every_byte_and_the_offer_waits_for_all(pair: Pair) -> None:
    pair.open()
    offered, ticket = pair.offer(SCATTERED, readers=2)
    first = pair.pull(ticket, SCATTERED)
    pair.target.call("wait", first)
    pair.expect(SCATTERED)
    pair.verify()
    assert not pair.source.call("snapshot", offered).released
    again = Request(source_blocks=(6, 1, 4), target_blocks=(1, 2, 4), num_tokens=11)
    second = pair.pull(ticket, again)
    pair.target.call("wait", second)
    pair.expect(again)
    pair.source.call("wait", offered)
    pair.source.call("wait_released", offered)
    pair.verify()
    assert not any(pair.holds())


def test_a_block_may_stand_in_several_offers(pair: Pair) -> None:
    pair.open()
    requests = [
        Request(source_blocks=(6, 1, 4), target_blocks=(0, 7, 3), num_tokens=11),
        Request(source_blocks=(6, 1, 5), target_blocks=(1, 2, 4), num_tokens=12),
        Request(source_blocks=(6, 2), target_blocks=(5, 6), num_tokens=7),
    ]
    offers = [pair.offer(request) for request in requests]
    pulls = [pair.pull(ticket, request) for (_, ticket), request in zip(offers, requests, strict=True)]
    for pulled, request in zip(pulls, requests, strict=True):
        pair.target.call("wait", pulled)
        pair.expect(request)
    for offered, _ in offers:
        pair.source.call("wait", offered)
        pair.source.call("wait_released", offered)
    pair.verify()
    assert not any(pair.holds())


def test_many_handoffs_in_flight_at_once_do_not_mix(pair: Pair) -> None:
    count = 48
    pair.open(source=Placement(num_blocks=2 * count, memory=pair.lane.memory), target=Placement(num_blocks=2 * count))
    requests = [
        Request(source_blocks=(2 * i, 2 * i + 1), target_blocks=(2 * count - 1 - i, i), num_tokens=1 + i % 8)
        for i in range(count)
    ]
    tickets = [pair.offer(request)[1] for request in requests]
    pulls = [pair.pull(ticket, request) for ticket, request in zip(tickets, requests, strict=True)]
    for pulled, request in zip(pulls, requests, strict=True):
        pair.target.call("wait", pulled)
        pair.expect(request)
    pair.verify()


@pytest.mark.parametrize("wait", ["wait_by_await", "wait_by_poll"])
def test_the_outcome_can_be_awaited_or_polled(pair: Pair, wait: str) -> None:
    pair.open()
    _, ticket = pair.offer(SCATTERED, payload=b"first token")
    pulled = pair.pull(ticket, SCATTERED)
    answer = pair.target.call(wait, pulled)
    taken = answer if wait == "wait_by_await" else answer[0]
    assert taken.payload == b"first token"
    if wait == "wait_by_poll":
        assert answer[1] < 0.05, "poll() must not block"
    pair.expect(SCATTERED)
    pair.verify()


def test_a_ticket_is_json_and_survives_a_router(pair: Pair) -> None:
    pair.open()
    _, ticket = pair.offer(SCATTERED)
    carried = json.loads(json.dumps(ticket))
    assert carried == ticket
    pair.target.call("wait", pair.pull(carried, SCATTERED))
    pair.expect(SCATTERED)
    pair.verify()


def test_blocks_may_be_a_mapping_by_group(pair: Pair) -> None:
    pair.open()
    _, ticket = pair.source.call("offer", {"full": [6, 1, 4]}, 11)
    pulled = pair.target.call("pull", ticket, {"full": [0, 7, 3]}, require=pair.lane.lane)
    pair.target.call("wait", pulled)
    pair.expect(SCATTERED)
    pair.verify()


def test_a_cancelled_offer_moves_nothing_and_lets_its_blocks_go(pair: Pair) -> None:
    pair.open()
    offered, ticket = pair.offer(SCATTERED)
    pair.source.call("cancel", offered)
    pair.source.call("wait_released", offered)
    pulled = pair.pull(ticket, SCATTERED)
    with pytest.raises(errors.KvlinkError):
        pair.target.call("wait", pulled)
    pair.target.call("wait_released", pulled)
    pair.verify()
    assert not any(pair.holds())
    pair.hand_over(SCATTERED)


def test_a_cancelled_pull_is_released_and_its_blocks_can_be_used_again(pair: Pair) -> None:
    pair.open()
    offered, ticket = pair.offer(SCATTERED, ttl_s=20)
    pulled = pair.pull(ticket, SCATTERED)
    pair.target.call("cancel", pulled)
    said = pair.target.call("wait_released", pulled)
    assert said.error in (None, "Cancelled")
    if said.error is None:  # it was done before the cancel came
        pair.expect(SCATTERED)
        pair.verify()
    else:
        pair.source.call("cancel", offered)
        pair.source.call("wait_released", offered)
        pair.expected_target.flat[:] = pair.target.call("memory")
    pair.hand_over(SCATTERED)
    assert not any(pair.holds())
