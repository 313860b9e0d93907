"""Two processes with integrity: a bit that turns over on the way is found, on each lane, exactly where it is."""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import Any

import numpy as np
import pytest
from helpers.patterns import APART_AXES, Geometry, Placement, Request, canonical, carve
from helpers.processes import Pair

from kvlink import errors

GEOMETRY = Geometry(heads=3)
REQUEST = Request(source_blocks=(6, 1, 4, 9), target_blocks=(0, 7, 3, 5, 2, 8), num_tokens=23, skip_tokens=5)
LARGE = Request(source_blocks=tuple(range(64)), target_blocks=tuple(range(63, -1, -1)), num_tokens=256)
MOST_TRIES = 5


def open_unlike(pair: Pair, integrity: str) -> None:
    """Blocks of 6 and 4 tokens, other orders of axes, K and V fused or apart."""
    memory = pair.lane.memory
    pair.open(
        GEOMETRY,
        source=Placement(memory=memory, num_blocks=12, block_tokens=6, axes=("block", "kv", "head", "token", "dim")),
        target=Placement(memory=memory, num_blocks=12, block_tokens=4, axes=APART_AXES, padding=(0, 1)),
        integrity=integrity,
    )


def cells_that_differ(pair: Pair) -> set[tuple[str, str, int, int]]:
    """(layer, component, head, token) of each token of the cells in which the target's memory is wrong."""
    side = pair.expected_target
    wrong = (pair.target.call("memory") != side.flat).astype(np.uint8)
    found, seen = set(), 0
    tokens_of = side.placement.block_tokens
    sub = gcd(tokens_of, pair.expected_source.placement.block_tokens)
    for (layer, component), view in canonical(carve(wrong, GEOMETRY, side.placement), side.placement).items():
        for block, offset, head, _ in np.argwhere(view.view(np.uint32) != 0).tolist():
            seen += 1
            token = REQUEST.target_blocks.index(block) * tokens_of + offset
            for each in range(token // sub * sub, token // sub * sub + sub):
                if REQUEST.skip_tokens <= each < REQUEST.num_tokens:
                    found.add((layer, component, head, each))
    assert seen == np.count_nonzero(wrong), "a byte changed that belongs to no element"
    return found


def named(failed: tuple[Any, ...]) -> set[tuple[str, str, int, int]]:
    return {
        (each.layer, each.component, head, token)
        for each in failed
        for head in range(each.first_head, each.end_head)
        for token in range(each.first_token, each.end_token)
    }


@pytest.mark.parametrize("integrity", ["crc32c", "xxh3"])
def test_what_is_right_passes(pair: Pair, integrity: str) -> None:
    open_unlike(pair, integrity)
    taken = pair.hand_over(REQUEST)
    assert taken.phases_s["check"] > 0
    pair.hand_over(Request(source_blocks=(), target_blocks=(), num_tokens=0), payload=b"no bytes, no sums")


@pytest.mark.parametrize("integrity", ["crc32c", "xxh3"])
def test_bits_that_turn_over_are_named_exactly(pair: Pair, integrity: str) -> None:
    open_unlike(pair, integrity)
    # A piece is a block pair, of which there are seven here, but on the lane `staged`: there all is one.
    pair.target.call("inject_faults", seed=5, corrupt=1.0 if pair.lane.lane == "staged" else 0.4)
    offered, ticket = pair.offer(REQUEST)
    pulled = pair.pull(ticket, REQUEST)
    with pytest.raises(errors.DataCorrupted, match=rf"(?s)other {integrity} sums.*tokens \["):
        pair.target.call("wait", pulled)
    told = pair.target.call("wait_released", pulled)
    pair.expect(REQUEST)
    wrong = cells_that_differ(pair)
    assert wrong
    assert named(told.failed) == wrong
    assert told.valid_prefix_tokens == min(token for *_, token in wrong)
    assert all(each.group == "full" for each in told.failed)
    # The offer lives, and another attempt brings what is right.
    pair.target.call("inject_faults")
    again = pair.pull(ticket, REQUEST)
    pair.target.call("wait", again)
    pair.target.call("wait_released", again)
    pair.source.call("wait_released", offered)
    pair.verify()
    assert not any(pair.holds())


def end_while_checked(find: Callable[[], Pair], end: Callable[[Pair, int], str], ended: str) -> tuple[Pair, int, Any]:
    """Begin a large handoff, and end it by what `end` does in the ten milliseconds in which it is checked.

    Returns the pair, the offer, and what was told of the pull. Where every core is busy, whoever watches for it may
    not get one in time, and the last sum may agree just before the end is heard of: then once more.
    """
    tries: list[tuple[str, str | None]] = []
    while len(tries) < MOST_TRIES:
        pair = find()
        pair.open_large(64)
        offered, ticket = pair.offer(LARGE, integrity="crc32c")
        pulled = pair.pull(ticket, LARGE)
        seen = end(pair, pulled)
        told = pair.target.call("wait_released", pulled)
        assert told.error in (None, ended)
        tries.append((seen, told.error))
        if tries[-1] == ("checking", ended):
            return pair, offered, told
    raise AssertionError(f"never caught: {tries}")


def test_a_pull_can_be_cancelled_while_it_is_checked(pair: Pair) -> None:
    def cancel(pair: Pair, pulled: int) -> str:
        return pair.target.call("cancel_when_moved", pulled)

    _, offered, _ = end_while_checked(lambda: pair, cancel, "Cancelled")
    pair.source.call("cancel", offered)
    pair.source.call("wait_released", offered)
    assert not any(pair.holds())


def test_a_source_that_dies_while_it_is_checked_fails_the_pull(spawn: Any, lane: Any) -> None:
    def start() -> Pair:
        return Pair(spawn(lane.env), spawn(lane.env), lane)

    def kill(pair: Pair, pulled: int) -> str:
        return pair.target.call("kill_when_checking", pulled, pid=pair.source.pid)

    pair, _, told = end_while_checked(start, kill, "PeerLost")
    # Either its sums had come before, and then nothing of it is wrong, or nothing is known to be right.
    assert told.valid_prefix_tokens == (0 if told.failed else LARGE.num_tokens)
    assert not any(pair.target.call("holds").values())
