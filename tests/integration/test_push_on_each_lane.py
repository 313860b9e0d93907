"""Two processes and real UCX: what a push promises, on each lane."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers.patterns import Geometry, Placement, Request
from helpers.processes import Pair

import kvlink

SCATTERED = Request(source_blocks=(6, 1, 4), target_blocks=(0, 7, 3), num_tokens=11)
COMMIT: tuple[str, dict[str, Any]] = ("commit", {})
#: Whatever it is told to be ready moves at once.
PIECEWISE = kvlink.Limits(push_at_once_tokens=0)
LAYERS = ("layers.0", "layers.1")


def commit(payload: bytes) -> tuple[str, dict[str, Any]]:
    return "commit", {"payload": payload}


def ready(**options: Any) -> tuple[str, dict[str, Any]]:
    return "ready", options


def test_what_is_committed_arrives_with_its_payload(pair: Pair) -> None:
    pair.open()
    for payload in (b"", b"first token", bytes(range(256)) * 8):
        taken = pair.push_over(SCATTERED, commit(payload))
        assert (taken.lane, taken.payload) == (pair.lane.lane, payload)
        assert taken.nbytes == 11 * 2 * 2 * 2 * 8 * 4  # tokens, layers, components, heads, dims, bytes
        assert {"claim", "move", "confirm", "total"} <= taken.phases_s.keys()
    assert not any(pair.holds())
    assert len(pair.source.call("peers")) == len(pair.target.call("peers")) == 1


@pytest.mark.parametrize("options", [{}, {"integrity": "crc32c"}], ids=["plain", "checked"])
def test_layers_move_as_they_become_ready_and_blocks_as_they_are_added(pair: Pair, options: dict[str, Any]) -> None:
    pair.open(limits=PIECEWISE, **options)
    reserved, ticket = pair.reserve(SCATTERED)
    pushed = pair.source.call("push", json.loads(json.dumps(ticket)), [6])
    first, second = LAYERS
    pair.source.call("tell", pushed, ready(layers=[second], tokens=range(4)), ready(layers=[first], tokens=range(1, 4)))
    pair.source.call("tell", pushed, ("add", {"blocks": [1, 4]}), ready(layers=[first], tokens=range(4, 11)))
    pair.source.call("tell", pushed, ready(layers=[first], tokens=range(1)), commit(b"all of it"))
    taken = pair.target.call("wait", reserved)
    pair.expect(SCATTERED)
    pair.target.call("wait_released", reserved)
    pair.source.call("wait_released", pushed)
    assert (taken.payload, taken.nbytes) == (b"all of it", 11 * 256)
    pair.verify()
    assert not any(pair.holds())


@pytest.mark.parametrize("skip_tokens", [0, 3, 4, 11])
def test_a_prefix_that_the_target_has_is_not_touched(pair: Pair, skip_tokens: int) -> None:
    pair.open(limits=PIECEWISE)
    request = Request(source_blocks=(6, 1, 4), target_blocks=(0, 7, 3), num_tokens=11, skip_tokens=skip_tokens)
    taken = pair.push_over(request, ready(tokens=range(5)), ready(tokens=range(5, 11)), COMMIT)
    assert taken.nbytes == (11 - skip_tokens) * 256


def test_a_push_of_no_tokens_completes(pair: Pair) -> None:
    pair.open()
    taken = pair.push_over(Request(source_blocks=(), target_blocks=(), num_tokens=0), commit(b"only this"))
    assert (taken.nbytes, taken.payload) == (0, b"only this")


def test_blocks_of_different_sizes_agree_on_every_token(pair: Pair) -> None:
    memory = pair.lane.memory
    pair.open(
        source=Placement(memory=memory, block_tokens=6, num_blocks=40),
        target=Placement(memory=memory, block_tokens=4, num_blocks=40),
        limits=PIECEWISE,
    )
    request = Request(source_blocks=(9, 3, 5, 1), target_blocks=(30, 2, 4, 6, 8, 10), num_tokens=23)
    pieces = [ready(layers=[layer], tokens=tokens) for tokens in (range(7), range(7, 20)) for layer in LAYERS]
    pair.push_over(request, *pieces, COMMIT)


def test_both_nodes_push_to_each_other_and_pull_from_each_other(pair: Pair) -> None:
    pair.open(Geometry(layers=("a",)))
    request = Request(source_blocks=(1, 2), target_blocks=(3, 4), num_tokens=8)
    back = Request(source_blocks=(6,), target_blocks=(7,), num_tokens=4)
    pair.push_over(request, COMMIT)
    reserved, ticket = pair.source.call("reserve", list(back.target_blocks), 4, require=pair.lane.lane)
    pushed = pair.target.call("push", ticket, list(back.source_blocks))
    pair.target.call("tell", pushed, COMMIT)
    pair.source.call("wait", reserved)
    pair.target.call("wait", pushed)
    pair.expected_source, pair.expected_target = pair.expected_target, pair.expected_source
    pair.expect(back)
    pair.expected_source, pair.expected_target = pair.expected_target, pair.expected_source
    pair.verify()


def test_a_push_goes_by_the_connection_that_a_pull_has_made(pair: Pair) -> None:
    pair.open()
    pair.hand_over(SCATTERED)
    pair.push_over(SCATTERED, COMMIT)
    pair.hand_over(SCATTERED)
    assert [peer["role"] for peer in pair.source.call("peers")] == ["claimant"]
    assert [peer["role"] for peer in pair.target.call("peers")] == ["source"]
