"""A ticket survives JSON and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlink.errors import TicketInvalid
from kvlink.handoff.ticket import MOST_SOURCES, TicketSource, copy_of, make_ticket, parse_ticket

EPOCH = bytes(range(16))


def source(rank: int = 0, **changes: Any) -> TicketSource:
    fields = {"name": f"prefill-{rank}", "address": f"127.0.0.1:{4000 + rank}", "epoch": rank.to_bytes(16, "big").hex()}
    return TicketSource(**{**fields, **changes})


def ticket(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "epoch": EPOCH,
        "sequence": 7,
        "sources": [source()],
        "num_tokens": 40,
        "groups": ["full"],
        "readers": 1,
        "ttl_ms": 30_000,
    }
    return make_ticket(**{**fields, **changes})


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:65535", "decode-2.cluster:7000"])
def test_a_ticket_survives_json(address: str) -> None:
    given = ticket(sources=[source(address=address, name="prefill-ß")], groups=["full", "sliding"])
    parsed = parse_ticket(json.loads(json.dumps(given)))
    assert (parsed.epoch_bytes, parsed.sequence, parsed.num_tokens) == (EPOCH, 7, 40)
    assert (parsed.groups, parsed.readers, parsed.id) == (["full", "sliding"], 1, f"{EPOCH.hex()}-7")
    assert parsed.sources == [source(address=address, name="prefill-ß")]
    assert parsed.title == f"{EPOCH.hex()}-7 from prefill-ß"


def test_a_ticket_may_name_as_many_ranks_as_there_are() -> None:
    ranks = [source(rank) for rank in range(MOST_SOURCES)]
    parsed = parse_ticket(json.loads(json.dumps(ticket(sources=ranks))))
    assert parsed.sources == ranks
    assert parsed.title.endswith("from prefill-0, prefill-1, prefill-2, prefill-3 and 1020 more")
    for wrong in ([], [*ranks, source(MOST_SOURCES)]):
        with pytest.raises(TicketInvalid, match=r"length.*sources"):
            parse_ticket(ticket(sources=wrong))


def test_a_source_is_named_once() -> None:
    with pytest.raises(TicketInvalid, match="names a source twice"):
        parse_ticket(ticket(sources=[source(1), source(2), source(1, name="the same node")]))


def test_a_copy_shares_nothing() -> None:
    whole = ticket()
    copied = copy_of(whole)
    assert copied == whole
    copied["sources"][0]["name"] = "other"
    copied["groups"].append("other")
    assert whole == ticket()


def test_any_change_to_any_field_is_noticed() -> None:
    whole = ticket()
    for name, value in whole.items():
        others = [None, [], {}, "", value + 1 if isinstance(value, int) else value + type(value)("x")]
        for other in others:
            with pytest.raises(TicketInvalid):
                parse_ticket({**whole, name: other})
    (told,) = whole["sources"]
    for name, value in told.items():
        for changed in (value + "x", value[:-1], None):
            with pytest.raises(TicketInvalid):
                parse_ticket({**whole, "sources": [{**told, name: changed}]})
    with pytest.raises(TicketInvalid):
        parse_ticket({**whole, "sources": [{**told, "more": 1}]})


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
        {"sources": [source(address="127.0.0.1")]},
        {"sources": [source(address="127.0.0.1:0")]},
        {"sources": [source(address="127.0.0.1:65536")]},
        {"sources": [source(address="::1:80")]},
        {"sources": [source(address="a b:80")]},
        {"sources": [source(1), source(address=":80")]},
        {"sequence": -1},
        {"sequence": 1 << 63},
        {"sequence": True},
        {"num_tokens": -1},
        {"num_tokens": 1.0},
        {"readers": 0},
        {"groups": []},
        {"groups": [1]},
        {"ttl_ms": 0},
        {"ttl_ms": 1.5},
        {"sources": [source(name="")]},
        {"sources": [source(epoch="short")]},
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
