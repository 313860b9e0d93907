"""A ticket survives JSON and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlink.errors import TicketInvalid
from kvlink.handoff.ticket import make_ticket, parse_ticket

EPOCH = bytes(range(16))


def ticket(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "epoch": EPOCH,
        "sequence": 7,
        "address": "127.0.0.1:4000",
        "name": "prefill-0",
        "num_tokens": 40,
        "groups": ["full"],
        "readers": 1,
    }
    return make_ticket(**{**fields, **changes})


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:65535", "decode-2.cluster:7000"])
def test_a_ticket_survives_json(address: str) -> None:
    given = ticket(address=address, groups=["full", "sliding"], name="prefill-ß")
    parsed = parse_ticket(json.loads(json.dumps(given)))
    assert (parsed.address, parsed.epoch_bytes, parsed.sequence, parsed.num_tokens) == (address, EPOCH, 7, 40)
    assert (parsed.groups, parsed.readers, parsed.id) == (["full", "sliding"], 1, f"{EPOCH.hex()}-7")


def test_any_change_to_any_field_is_noticed() -> None:
    whole = ticket()
    for name, value in whole.items():
        others = [None, [], {}, "", value + 1 if isinstance(value, int) else value + type(value)("x")]
        for other in others:
            with pytest.raises(TicketInvalid):
                parse_ticket({**whole, name: other})


def test_a_missing_and_an_unknown_field_are_noticed() -> None:
    whole = ticket()
    for name in whole:
        with pytest.raises(TicketInvalid):
            parse_ticket({key: value for key, value in whole.items() if key != name})
    with pytest.raises(TicketInvalid):
        parse_ticket({**whole, "more": 1})


@settings(max_examples=60)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(), st.lists))
def test_garbage_is_a_typed_error(garbage: Any) -> None:
    with pytest.raises(TicketInvalid):
        parse_ticket(garbage)


@settings(max_examples=60)
@given(st.dictionaries(st.text() | st.integers() | st.sampled_from(sorted(ticket())), st.text() | st.integers()))
def test_a_mapping_of_garbage_is_a_typed_error(garbage: Any) -> None:
    with pytest.raises(TicketInvalid):
        parse_ticket(garbage)


@pytest.mark.parametrize(
    "changes",
    [
        {"address": "127.0.0.1"},
        {"address": "127.0.0.1:0"},
        {"address": "127.0.0.1:65536"},
        {"address": "::1:80"},
        {"address": "a b:80"},
        {"address": ":80"},
        {"sequence": -1},
        {"sequence": 1 << 63},
        {"sequence": True},
        {"num_tokens": -1},
        {"num_tokens": 1.0},
        {"readers": 0},
        {"groups": []},
        {"groups": [1]},
        {"name": ""},
        {"epoch": b"short"},
    ],
    ids=repr,
)
def test_a_field_out_of_bounds_is_refused_though_the_check_fits(changes: dict[str, Any]) -> None:
    with pytest.raises(TicketInvalid):
        parse_ticket(ticket(**changes))


def test_a_newer_version_is_named() -> None:
    with pytest.raises(TicketInvalid, match="version 2 is newer"):
        parse_ticket({**ticket(), "kvlink": 2})


def test_text_is_to_be_decoded_first() -> None:
    with pytest.raises(TicketInvalid, match="decode its JSON first"):
        parse_ticket(json.dumps(ticket()))
