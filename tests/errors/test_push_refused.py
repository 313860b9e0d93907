"""What is wrong with a push or a reservation is refused by name, and harms neither what lives nor what comes next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

import kvlink
from kvlink import errors
from kvlink.handoff.asking import ask
from kvlink.handoff.call import CALL_BACK
from kvlink.handoff.reservation import make_reservation
from kvlink.handoff.ticket import TicketSource

MakeNode = Callable[..., kvlink.Node]
TOKENS = 10
PIECEWISE = kvlink.Limits(push_at_once_tokens=0)


def cache(head_dim: int = 8, layers: int = 2) -> kvlink.KVCache:
    tensors = {f"layers.{i}": np.zeros((2, 8, 4, 2, head_dim), dtype="float32") for i in range(layers)}
    return kvlink.KVCache.from_tensors(tensors, axes="kv block token head dim", block_tokens=4)


@pytest.fixture
def make_node() -> Iterator[MakeNode]:
    nodes: list[kvlink.Node] = []

    def make(name: str, of: kvlink.KVCache | None = None, **options: Any) -> kvlink.Node:
        nodes.append(kvlink.Node(of or cache(), name=name, copy_threads=1, **options))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


@pytest.fixture
def pair(make_node: MakeNode) -> tuple[kvlink.Node, kvlink.Node]:
    return make_node("prefill", limits=PIECEWISE), make_node("decode")


def reserve(node: kvlink.Node, blocks: tuple[int, ...] = (0, 1, 2), **options: Any) -> kvlink.Slot:
    return node.reserve(list(blocks), num_tokens=TOKENS, **{"ttl_s": 10, **options})


def hand_over(source: kvlink.Node, target: kvlink.Node) -> None:
    """A push that goes well, as after everything that was refused."""
    slot = reserve(target, (5, 6, 7))
    push = source.push(slot.ticket, [5, 6, 7], deadline_s=10)
    push.commit(b"fine")
    assert slot.wait(timeout_s=10).payload == b"fine"
    push.wait(timeout_s=10)
    assert slot.wait_released(timeout_s=5)
    assert push.wait_released(timeout_s=5)


def refused(push: kvlink.Push, error: type[errors.KvlinkError], match: str) -> None:
    with pytest.raises(error, match=match):
        push.wait(timeout_s=10)
    assert push.wait_released(timeout_s=5)


def forged(slot: kvlink.Slot, **other: Any) -> dict[str, Any]:
    """A ticket like the slot's, but for some of what it says, with a check that fits."""
    told = {**slot.ticket, **other}
    epoch, _, sequence = told["reservation"].partition("-")
    return make_reservation(
        epoch=bytes.fromhex(epoch),
        sequence=int(sequence),
        target=TicketSource(**told["target"]),
        **{key: told[key] for key in ("num_tokens", "skip_tokens", "groups", "ttl_ms")},
    )


def test_the_first_push_is_taken_and_the_second_told_so(pair: Any, make_node: MakeNode) -> None:
    source, target = pair
    other = make_node("other")
    slot = reserve(target)
    push = source.push(slot.ticket, [0, 1, 2], deadline_s=10)
    push.ready(layers=["layers.0"])
    hand_over(source, target)  # whose PUSH comes behind the first one's
    for late in (other, source):
        refused(late.push(slot.ticket, [3, 4, 5]), errors.AlreadyClaimed, "somebody pushes to this reservation already")
    push.commit(b"the first")
    assert slot.wait(timeout_s=10).payload == b"the first"
    push.wait(timeout_s=10)
    refused(other.push(slot.ticket, [3, 4, 5]), errors.AlreadyClaimed, "was pushed to already")
    assert not any((*source.holds().values(), *target.holds().values(), *other.holds().values()))


def test_a_push_to_what_is_not_reserved_any_more_says_why(pair: Any) -> None:
    source, target = pair
    unknown = reserve(target)
    epoch = target.epoch
    refused(
        source.push(forged(unknown, reservation=f"{epoch}-999"), [0, 1, 2]),
        errors.UnknownHandoff,
        r"push .*-999: decode .*no such reservation",
    )
    unknown.cancel()
    with pytest.raises(errors.Cancelled, match="reservation .* cancelled by its owner"):
        unknown.wait(timeout_s=5)
    refused(source.push(unknown.ticket, [0, 1, 2]), errors.Cancelled, "the reservation was cancelled")
    late = reserve(target, ttl_s=0.01)
    with pytest.raises(errors.DeadlineExceeded, match="reserved"):
        late.wait(timeout_s=5)
    refused(source.push(late.ticket, [0, 1, 2]), errors.TicketExpired, "time ran out")
    hand_over(source, target)


def test_a_reservation_that_a_push_does_not_fit_goes_on_waiting(pair: Any) -> None:
    source, target = pair
    slot = reserve(target)
    push = source.push(forged(slot, num_tokens=9), [0, 1, 2])
    refused(push, errors.InvalidArgument, "10 tokens are reserved, and 9 are pushed")
    assert (slot.state, slot.outcome) == ("reserved", None)
    push = source.push(slot.ticket, [0, 1, 2])
    push.commit()
    slot.wait(timeout_s=10)


def test_caches_that_do_not_fit_are_refused_with_the_field(make_node: MakeNode) -> None:
    source, target = make_node("prefill", cache(head_dim=16)), make_node("decode")
    slot = reserve(target)
    refused(source.push(slot.ticket, [0, 1, 2]), errors.LayoutMismatch, "connect to decode .*8.*16|connect .*16.*8")
    # With the values apart, as the error of a pull has them: what the target has found, and what the source has.
    push = source.push(slot.ticket, [0, 1, 2])
    assert push.wait_released(timeout_s=10)
    found = push.error
    assert isinstance(found, errors.LayoutMismatch)
    assert (found.field, found.source_value, found.target_value) == ("head_dim", "16", "8")
    named = reserve(target, (4, 5, 6), sources=[source.descriptor])
    with pytest.raises(errors.LayoutMismatch, match="prefill") as caught:
        named.wait(timeout_s=10)
    assert (caught.value.field, caught.value.source_value, caught.value.target_value) == ("head_dim", "16", "8")
    fewer = make_node("fewer", cache(layers=1))
    refused(fewer.push(slot.ticket, [0, 1, 2]), errors.LayoutMismatch, "connect to decode .*layers")
    assert slot.state == "reserved"


def test_a_target_in_another_life_is_stale_and_one_that_is_gone_unreachable(pair: Any) -> None:
    source, target = pair
    slot = reserve(target)
    target.suspend(deadline_s=0)
    with pytest.raises(errors.NotReady):
        slot.wait(timeout_s=5)
    refused(source.push(slot.ticket, [0, 1, 2]), errors.NotReady, "connect to decode .*suspended")
    target.resume(cache())
    refused(source.push(slot.ticket, [0, 1, 2]), errors.StalePeer, "connect to decode .*restarted")
    hand_over(source, target)
    target.close()
    refused(source.push(slot.ticket, [0, 1, 2]), errors.PeerUnreachable, "connect to decode .*running")


def test_a_node_that_is_drained_reserves_and_pushes_nothing_new_and_ends_what_it_has(pair: Any) -> None:
    source, target = pair
    slot = reserve(target)
    push = source.push(slot.ticket, [0, 1, 2])
    for node in pair:
        with pytest.raises(errors.DeadlineExceeded):
            node.drain(deadline_s=0)
    with pytest.raises(errors.NotReady):
        reserve(target, (4, 5, 6))
    with pytest.raises(errors.NotReady):
        source.push(slot.ticket, [4, 5, 6])
    push.commit()
    slot.wait(timeout_s=10)
    for node in pair:
        node.drain(deadline_s=5)
        assert not any(node.holds().values())


def test_sources_that_are_none_are_refused_and_hold_nothing(pair: Any) -> None:
    source, target = pair
    one = source.descriptor
    wrong: list[Any] = [
        one,
        "prefill",
        [one, one],
        [{**one, "epoch": "1234"}],
        [{**one, "address": "nowhere"}],
        [{"name": "prefill"}],
        [7],
        [{**one, "epoch": f"{number:032x}"} for number in range(1025)],
    ]
    for sources in wrong:
        with pytest.raises(errors.InvalidArgument, match="reserve: sources"):
            reserve(target, sources=sources)
    assert not any(target.holds().values())
    hand_over(source, target)


def test_a_reservation_for_named_sources_is_for_this_life_of_them(pair: Any, make_node: MakeNode) -> None:
    source, target = pair
    other = make_node("other")
    slot = reserve(target, sources=[source.descriptor, other.descriptor])
    assert [one["name"] for one in slot.ticket["sources"]] == ["prefill", "other"]
    with pytest.raises(errors.TicketInvalid, match="altered"):
        source.push({**slot.ticket, "sources": slot.ticket["sources"][:1]}, [0, 1, 2])
    twice = {**slot.ticket, "sources": slot.ticket["sources"][:1] * 2}
    with pytest.raises(errors.TicketInvalid):
        source.push(twice, [0, 1, 2])
    source.suspend(deadline_s=0)
    with pytest.raises(errors.KvlinkError, match="prefill"):
        slot.wait(timeout_s=5)
    source.resume(cache())
    with pytest.raises(errors.StalePeer, match="reserved for another life of prefill"):
        source.push(slot.ticket, [0, 1, 2])
    gone = reserve(target, sources=[{**source.descriptor, "epoch": "ab" * 16}])
    with pytest.raises(errors.StalePeer, match="prefill"):
        gone.wait(timeout_s=5)
    silent = reserve(target, sources=[{**source.descriptor, "address": "127.0.0.1:1", "epoch": "cd" * 16}])
    with pytest.raises(errors.PeerUnreachable, match="127.0.0.1:1"):
        silent.wait(timeout_s=5)
    assert not any(target.holds().values())
    hand_over(source, target)


@pytest.mark.parametrize("who", ["garbage", "nobody", "strangers", "twice", "nowhere"])
def test_calls_back_for_anything_else_are_refused(pair: Any, who: str) -> None:
    source, target = pair
    own = {name: source.descriptor[name] for name in ("name", "address", "epoch")}
    other = {**own, "epoch": "ab" * 16}
    bodies: dict[str, Any] = {
        "garbage": b"\xc1",
        "nobody": [],
        "strangers": [other],
        "twice": [own, own],
        "nowhere": [own, {**other, "address": "nowhere"}],
    }
    body = bodies[who] if who == "garbage" else msgspec.msgpack.encode(bodies[who])
    with pytest.raises(errors.ProtocolError, match="call"):
        ask(source, target.address, CALL_BACK, body=body, deadline_s=5)
    assert target.peers() == []
    hand_over(source, target)


def test_a_lane_that_is_required_and_leads_nowhere_is_told_to_the_source(pair: Any) -> None:
    source, target = pair
    slot = reserve(target, require="mapped")  # ordinary memory cannot be mapped
    refused(source.push(slot.ticket, [0, 1, 2]), errors.LaneUnavailable, "the lane that the reservation requires")
    assert slot.state == "reserved"


@pytest.mark.parametrize(
    ("blocks", "options", "reason"),
    [
        ([0, 1], {}, "2 blocks, and 10 tokens"),
        ([0, 1, 8], {}, r"block 8 is outside \[0, 8\)"),
        ([0, 1, 1], {}, "block 1 appears twice"),
        ([0, 1, 2], {"skip_tokens": 11}, r"skip_tokens is 11, outside \[0, 10\]"),
        ([0, 1, 2], {"ttl_s": 0}, "ttl_s"),
        ([0, 1, 2], {"label": 7}, "label"),
        ([0, 1, 2], {"require": "telepathy"}, "telepathy"),
    ],
)
def test_a_reservation_that_cannot_be_is_refused(pair: Any, blocks: Any, options: Any, reason: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=reason):
        pair[1].reserve(blocks, num_tokens=TOKENS, **options)
    assert not any(pair[1].holds().values())


@pytest.mark.parametrize(
    ("blocks", "options", "reason"),
    [
        ([0, 1, 8], {}, r"block 8 is outside \[0, 8\)"),
        ([0, 1, 1], {}, "block 1 appears twice"),
        ([0], {"num_tokens": 9}, "num_tokens is 9, and 10 are reserved"),
        ([0], {"deadline_s": -1}, "deadline_s"),
        ([0], {"integrity": "md5"}, "md5"),
        ({"full": [0], "state": [1]}, {}, "groups"),
    ],
)
def test_a_push_that_cannot_be_is_refused(pair: Any, blocks: Any, options: Any, reason: str) -> None:
    source, target = pair
    with pytest.raises(errors.InvalidArgument, match=reason):
        source.push(reserve(target).ticket, blocks, **options)
    assert not any(source.holds().values())


def test_what_is_no_ticket_of_a_reservation_is_refused(pair: Any) -> None:
    source, target = pair
    slot = reserve(target)
    with pytest.raises(errors.TicketInvalid, match="which is pulled"):
        source.push(target.offer([5], num_tokens=1).ticket, [0])
    with pytest.raises(errors.TicketInvalid, match="not a ticket"):
        source.pull(slot.ticket, [0, 1, 2])
    for wrong, reason in [
        ("", "mapping"),
        ({}, "not a reservation's ticket"),
        ({**slot.ticket, "kvlink": 2}, "newer"),
        ({**slot.ticket, "num_tokens": 11}, "altered"),
        (forged(slot, skip_tokens=11), "contradict"),
        (forged(slot, reservation="0" * 32 + "-1"), "another node than its target"),
        (forged(slot, target={**slot.ticket["target"], "address": "nowhere"}), "host:port"),
    ]:
        with pytest.raises(errors.TicketInvalid, match=reason):
            source.push(wrong, [0])


def test_what_cannot_be_ready_is_refused_and_nothing_of_it_moves(pair: Any) -> None:
    source, target = pair
    slot = reserve(target)
    push = source.push(slot.ticket, [0, 1], deadline_s=10)
    for said, reason in [
        ({"layers": ["layers.9"]}, "no layer 'layers.9'"),
        ({"layers": ["layers.0", "layers.0"], "tokens": range(4)}, "named twice"),
        ({"layers": []}, "list of names"),
        ({"layers": "layers.0"}, "list of names"),
        ({"tokens": range(4, 11)}, r"outside \[0, 10\]"),
        ({"tokens": range(4, 4)}, r"tokens \[4, 4\)"),
        ({"tokens": range(0, 8, 2)}, "step 1"),
        ({"tokens": (0, 4)}, "must be a range"),
        ({"tokens": range(4, 9)}, "tokens up to 9 of layer 'layers.0' are ready, and the blocks .* hold 8: add more"),
        ({"tokens": range(4), "fence": 7}, "synchronize"),
    ]:
        with pytest.raises(errors.InvalidArgument, match=reason):
            push.ready(**said)
    push.ready(layers=["layers.1"], tokens=range(2, 6))
    with pytest.raises(errors.InvalidArgument, match=r"tokens \[0, 8\) of layer 'layers.1' are ready already"):
        push.ready(tokens=range(8))
    with pytest.raises(errors.InvalidArgument, match="add more first"):
        push.commit()
    with pytest.raises(errors.InvalidArgument, match="belongs to the push already"):
        push.add([1])
    with pytest.raises(errors.InvalidArgument, match="more than the"):
        push.commit(bytes((1 << 20) + 1))
    push.add([2, 3, 4])  # the last two are padding
    push.commit()
    for late in (push.commit, push.ready, lambda: push.add([6])):
        with pytest.raises(errors.InvalidArgument, match="committed already|succeeded already"):
            late()
    slot.wait(timeout_s=10)
    assert slot.bytes == 2 * TOKENS * 128


def test_blocks_that_are_written_are_neither_pushed_nor_reserved(pair: Any) -> None:
    source, target = pair
    slot = reserve(target)
    with pytest.raises(errors.BlocksBusy):
        reserve(target, (2, 3, 4))
    with pytest.raises(errors.BlocksBusy):
        target.push(reserve(source, (5, 6, 7)).ticket, [2])
    push = target.push(reserve(source, (1, 2, 3)).ticket, [5], deadline_s=10)
    with pytest.raises(errors.BlocksBusy):
        push.add([0])
    push.cancel()
    with pytest.raises(errors.Cancelled):
        push.wait(timeout_s=5)
    with pytest.raises(errors.Cancelled, match="cancelled"):
        push.add([6])
    slot.cancel()
    assert slot.wait_released(timeout_s=5)
