"""Tickets that are garbage, truncated, altered, expired, used up, or of a node that is gone."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from helpers.patterns import Request
from helpers.processes import Pair

from kvlink import errors
from kvlink.testing import Worker

REQUEST = Request(source_blocks=(6, 1, 4), target_blocks=(0, 7, 3), num_tokens=11)


def refuse(pair: Pair, ticket: Any, *kinds: type[Exception], timeout_s: float = 10.0) -> Exception:
    """A pull of the ticket fails with one of the kinds, in time, and changes no byte and no hold."""
    began = time.monotonic()
    with pytest.raises(kinds) as caught:
        pair.target.call("wait", pair.pull(ticket, REQUEST, deadline_s=timeout_s), timeout_s=timeout_s + 1)
    assert time.monotonic() - began < timeout_s + 1
    pair.verify()
    assert not any(pair.target.call("holds").values())
    return caught.value


@pytest.mark.parametrize(
    "ticket",
    [None, "", "ticket", b"\x00", 7, [], {}, {"kvlink": 1}, {"id": "x"}, {1: 2}, {"kvlink": 1, "id": ["deep"] * 1000}],
    ids=lambda ticket: repr(ticket)[:20],
)
def test_garbage_is_refused(opened: Pair, ticket: Any) -> None:
    refuse(opened, ticket, errors.TicketInvalid)


def test_a_ticket_that_lost_any_field_is_refused(opened: Pair) -> None:
    _, ticket = opened.offer(REQUEST)
    for name in ticket:
        refuse(opened, {key: value for key, value in ticket.items() if key != name}, errors.TicketInvalid)


def test_a_ticket_with_any_field_altered_is_refused(opened: Pair) -> None:
    _, ticket = opened.offer(REQUEST)
    for name, value in ticket.items():
        for other in _altered(value):
            refuse(opened, {**copy.deepcopy(ticket), name: other}, errors.TicketInvalid)


def test_a_ticket_with_the_text_cut_or_flipped_anywhere_is_refused_or_unreadable(opened: Pair) -> None:
    _, ticket = opened.offer(REQUEST)
    text = json.dumps(ticket)
    for position in range(0, len(text), 7):
        for damaged in (text[:position], text[:position] + chr(ord(text[position]) ^ 1) + text[position + 1 :]):
            try:
                found = json.loads(damaged)
            except json.JSONDecodeError:
                continue
            if found != ticket:
                refuse(opened, found, errors.TicketInvalid)


def test_an_expired_ticket_is_refused_and_the_offer_fails(opened: Pair) -> None:
    offered, ticket = opened.offer(REQUEST, ttl_s=0.1)
    with pytest.raises(errors.TicketExpired):
        opened.source.call("wait", offered, timeout_s=5)
    opened.source.call("wait_released", offered, timeout_s=5)
    assert not any(opened.source.call("holds").values())
    refuse(opened, ticket, errors.TicketExpired)


def test_a_ticket_is_claimed_once_for_each_reader(opened: Pair) -> None:
    _, ticket = opened.offer(REQUEST)
    opened.target.call("wait", opened.pull(ticket, REQUEST))
    opened.expect(REQUEST)
    refuse(opened, ticket, errors.AlreadyClaimed)
    refuse(opened, ticket, errors.AlreadyClaimed)


def test_a_cancelled_offer_is_named_as_such(opened: Pair) -> None:
    offered, ticket = opened.offer(REQUEST)
    opened.source.call("cancel", offered)
    opened.source.call("wait_released", offered)
    refuse(opened, ticket, errors.Cancelled, errors.UnknownHandoff)


def test_a_ticket_of_a_closed_node_is_refused_within_the_deadline(opened: Pair) -> None:
    _, ticket = opened.offer(REQUEST)
    opened.source.call("close_node")
    refuse(opened, ticket, errors.PeerUnreachable, timeout_s=3)


def test_a_ticket_of_a_killed_process_is_refused_within_the_deadline(
    opened: Pair, spawn: Callable[..., Worker]
) -> None:
    doomed = spawn()
    doomed.call("open", opened.geometry, opened.expected_source.placement, seed=5)
    _, ticket = doomed.call("offer", [6, 1, 4], 11)
    doomed.kill()
    refuse(opened, ticket, errors.PeerUnreachable, timeout_s=3)


def test_a_ticket_of_the_life_before_is_refused_as_stale(opened: Pair, spawn: Callable[..., Worker]) -> None:
    doomed = spawn()
    address = doomed.call("open", opened.geometry, opened.expected_source.placement, seed=5)["address"]
    _, ticket = doomed.call("offer", [6, 1, 4], 11)
    doomed.kill()
    reborn = spawn()
    reborn.call("open", opened.geometry, opened.expected_source.placement, seed=5, listen=address)
    reborn.call("offer", [6, 1, 4], 11)
    refuse(opened, ticket, errors.StalePeer)


@pytest.mark.parametrize(("ours", "theirs"), [(b"right", b"wrong"), (b"right", None), (None, b"wrong")])
def test_nodes_without_a_common_secret_never_meet(opened: Pair, ours: bytes | None, theirs: bytes | None) -> None:
    placement = opened.expected_source.placement
    opened.source.call("open", opened.geometry, placement, seed=2, secret=ours)
    opened.target.call("open", opened.geometry, placement, seed=3, secret=theirs)
    offered, ticket = opened.offer(REQUEST)
    refuse(opened, ticket, errors.AuthenticationFailed)
    assert opened.source.call("snapshot", offered).state == "offered"
    assert opened.source.call("peers") == []


def test_nodes_with_a_common_secret_do(opened: Pair) -> None:
    opened.open(secret=b"a common secret")
    opened.hand_over(REQUEST)


def _altered(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, -1, 2**63, str(value), None]
    if isinstance(value, str):
        flipped = value[:-1] + chr(ord(value[-1]) ^ 1) if value else "x"
        return [flipped, value + "0", value[:-1] if value else "y", 0, None]
    return [None, [], "x"] if value else [None, ["x"]]
