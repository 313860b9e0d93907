"""A pull that fails names all that it was asked for, wherever it was when it failed, and calls no byte of it right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers.markers import LANES
from helpers.patterns import Request
from helpers.processes import Pair

from kvlink import errors
from kvlink.testing import Worker

# Of blocks of four tokens: the second is left out by the target, tokens 0 to 2 are there already.
REQUEST = Request(source_blocks=(6, 1, 4), target_blocks=(0, -1, 3), num_tokens=11, skip_tokens=3)
WANTED_TOKENS = {3, 8, 9, 10}
#: What it fails with, and the number of the pull.
Failing = tuple[Any, int]


def elements(failed: tuple[Any, ...]) -> set[tuple[str, str, str, int, int]]:
    """What the ranges cover, one by one; no two may cover the same."""
    found = [
        (one.group, one.layer, one.component, head, token)
        for one in failed
        for head in range(one.first_head, one.end_head)
        for token in range(one.first_token, one.end_token)
    ]
    assert len(found) == len(set(found))
    return set(found)


def wanted(pair: Pair) -> set[tuple[str, str, str, int, int]]:
    return {
        ("full", layer, component, head, token)
        for layer in pair.geometry.layers
        for component in "kv"
        for head in range(pair.geometry.heads)
        for token in WANTED_TOKENS
    }


def closed(pair: Pair) -> Failing:
    """The source is gone before the target ever connects: nobody has told its layout."""
    _, ticket = pair.offer(REQUEST)
    pair.source.call("shut")
    return errors.PeerUnreachable, pair.pull(ticket, REQUEST, deadline_s=5)


def withdrawn(pair: Pair) -> Failing:
    """The claim is refused."""
    offered, ticket = pair.offer(REQUEST)
    pair.source.call("cancel", offered)
    return errors.Cancelled, pair.pull(ticket, REQUEST, deadline_s=5)


def unanswered(pair: Pair) -> Failing:
    """The source is connected, and stops before it answers."""
    whole = Request(source_blocks=REQUEST.source_blocks, target_blocks=(0, 1, 3), num_tokens=11)
    pair.hand_over(whole)
    _, ticket = pair.offer(REQUEST)
    pair.source.pause()
    return errors.DeadlineExceeded, pair.pull(ticket, REQUEST, deadline_s=0.3)


def mute(pair: Pair) -> Failing:
    """The source stops before the target has connected."""
    _, ticket = pair.offer(REQUEST)
    pair.source.pause()
    return (errors.PeerUnreachable, errors.DeadlineExceeded), pair.pull(ticket, REQUEST, deadline_s=0.3)


@pytest.mark.parametrize("fails", [closed, withdrawn, unanswered, mute], ids=lambda fails: fails.__name__)
def test_all_that_was_asked_for_is_named(spawn: Callable[..., Worker], fails: Callable[[Pair], Failing]) -> None:
    pair = Pair(spawn(), spawn(), LANES[0])  # of its own, since it stops one
    pair.open()
    error, pulled = fails(pair)
    try:
        with pytest.raises(error) as caught:
            pair.target.call("wait", pulled)
    finally:
        pair.source.resume()
    assert elements(caught.value.failed) == wanted(pair)
    assert caught.value.valid_prefix_tokens == REQUEST.skip_tokens
