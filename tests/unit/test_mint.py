"""A scheduler makes tickets without a node, and the ranks offer under them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest
from unit.fake_engine import FakeEngine

import kvlink
from kvlink import errors
from kvlink.handoff import parse_ticket, running


def descriptor(rank: int = 0, *, groups: tuple[str, ...] = ("full",), **changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "kvlink": 1,
        "name": f"prefill-{rank}",
        "address": f"127.0.0.1:{4000 + rank}",
        "epoch": rank.to_bytes(16, "big").hex(),
        "groups": [{"name": name, "num_blocks": 8, "block_tokens": 4} for name in groups],
    }
    return {**fields, **changes}


def node(name: str = "prefill-0", **options: Any) -> kvlink.Node:
    tensor = np.zeros((2, 8, 4, 2, 8), dtype="float32")
    cache = kvlink.KVCache.from_tensors({"layers.0": tensor}, axes="kv block token head dim", block_tokens=4)
    return kvlink.Node(cache, name=name, copy_threads=1, **options)


@pytest.fixture
def prefill(monkeypatch: pytest.MonkeyPatch) -> Iterator[kvlink.Node]:
    monkeypatch.setattr(running, "start_engine", lambda cache, epoch, settings, **_: FakeEngine(epoch=epoch))
    with node() as made:
        yield made


def test_a_ticket_names_every_rank_and_an_id_of_the_mint() -> None:
    mint = kvlink.TicketMint([descriptor(rank) for rank in range(3)])
    first, second = (
        parse_ticket(json.loads(json.dumps(mint.offer(num_tokens=40, readers=2, ttl_s=7.5)))) for _ in range(2)
    )
    assert [source.name for source in first.sources] == ["prefill-0", "prefill-1", "prefill-2"]
    assert (first.num_tokens, first.readers, first.ttl_ms, first.groups) == (40, 2, 7500, ["full"])
    assert (first.id, second.id) == (f"{mint.epoch}-1", f"{mint.epoch}-2")
    assert first.epoch_bytes.hex() == mint.epoch
    assert kvlink.TicketMint([descriptor()]).epoch != mint.epoch
    assert "prefill-1" in repr(mint)


def test_a_ticket_may_name_some_ranks_only() -> None:
    mint = kvlink.TicketMint([descriptor(rank) for rank in range(4)])
    assert [source["name"] for source in mint.offer(num_tokens=1, ranks=[3, 1])["sources"]] == [
        "prefill-3",
        "prefill-1",
    ]
    for wrong in ([], [1, 1], [4], [-1], [True], ["1"]):
        with pytest.raises(errors.InvalidArgument):
            mint.offer(num_tokens=1, ranks=wrong)


def test_the_groups_are_those_of_all_ranks_named() -> None:
    mint = kvlink.TicketMint([descriptor(0, groups=("full", "swa")), descriptor(1, groups=("state", "full"))])
    assert mint.offer(num_tokens=1)["groups"] == ["full", "swa", "state"]
    assert mint.offer(num_tokens=1, ranks=[0])["groups"] == ["full", "swa"]


def test_ids_do_not_repeat_over_threads() -> None:
    mint = kvlink.TicketMint([descriptor()])
    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(lambda _: mint.offer(num_tokens=1)["id"], range(400)))
    assert len(set(ids)) == 400


@pytest.mark.parametrize(
    "changes",
    [
        {"num_tokens": -1},
        {"num_tokens": 1 << 31},
        {"readers": 0},
        {"readers": 1 << 17},
        {"ttl_s": 0},
        {"ttl_s": 1e6},
    ],
)
def test_an_argument_out_of_bounds_is_refused_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidArgument, match=next(iter(changes))):
        kvlink.TicketMint([descriptor()]).offer(**{"num_tokens": 1, **changes})


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        [descriptor(rank) for rank in range(1025)],
        [descriptor(1), descriptor(1, name="again")],
        [{}],
        [None],
        [7],
        ["prefill-0"],
        [{1: 2}],
        [descriptor(kvlink=2)],
        [descriptor(address="nowhere")],
        [descriptor(epoch="short")],
        [descriptor(name="")],
        [descriptor(groups=())],
        [{**descriptor(), "groups": [{"name": "full"}]}],
    ],
    ids=lambda wrong: repr(wrong)[:24],
)
def test_what_is_no_descriptor_is_refused(wrong: Any) -> None:
    with pytest.raises(errors.InvalidArgument):
        kvlink.TicketMint(wrong)


def test_the_mint_needs_neither_native_code_nor_numpy() -> None:
    code = f"""
import sys
import kvlink
ticket = kvlink.TicketMint([{descriptor()!r}]).offer(num_tokens=1)
print(sorted({{"kvlink._native", "numpy", "kvlink.handoff.node", "kvlink.transport"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_descriptor_says_who_and_how_paged_and_no_more(prefill: kvlink.Node) -> None:
    told = prefill.descriptor
    assert json.loads(json.dumps(told)) == msgspec.msgpack.decode(msgspec.msgpack.encode(told)) == told
    assert told == {
        "kvlink": 1,
        "name": "prefill-0",
        "address": prefill.address,
        "epoch": prefill.epoch,
        "groups": [{"name": "full", "num_blocks": 8, "block_tokens": 4, "slots": False}],
    }
    told["groups"].clear()
    assert prefill.descriptor["groups"]


def test_an_offer_under_a_minted_ticket_takes_its_terms_from_it(prefill: kvlink.Node) -> None:
    ticket = kvlink.TicketMint([prefill.descriptor, descriptor(5)]).offer(num_tokens=7, readers=3, ttl_s=2)
    offer = prefill.offer([1, 2], ticket=ticket)
    assert offer.id == ticket["id"]
    assert offer.ticket == ticket
    assert ticket["id"] in repr(offer)
    prefill.offer([3, 4], ticket=ticket, num_tokens=7, readers=3, ttl_s=2.0)
    for changes in ({"num_tokens": 8}, {"readers": 1}, {"ttl_s": 3}):
        with pytest.raises(errors.InvalidArgument, match="the ticket says"):
            prefill.offer([1, 2], ticket=ticket, **changes)
    with pytest.raises(errors.InvalidArgument, match="need 2"):
        prefill.offer([1], ticket=ticket)


def test_an_offer_is_refused_under_a_ticket_that_does_not_name_the_node(prefill: kvlink.Node) -> None:
    with pytest.raises(errors.InvalidArgument, match="does not name this node, prefill-0"):
        prefill.offer([1], ticket=kvlink.TicketMint([descriptor(7)]).offer(num_tokens=1))
    earlier = {**prefill.descriptor, "epoch": bytes(16).hex()}
    with pytest.raises(errors.StalePeer, match="make the mint anew"):
        prefill.offer([1], ticket=kvlink.TicketMint([earlier]).offer(num_tokens=1))
    with pytest.raises(errors.InvalidArgument, match="is of an offer of this node"):
        prefill.offer([1], ticket=prefill.offer([1], num_tokens=1).ticket)
    ticket = kvlink.TicketMint([prefill.descriptor]).offer(num_tokens=1)
    with pytest.raises(errors.TicketInvalid):
        prefill.offer([1], ticket={**ticket, "num_tokens": 2})
    with pytest.raises(errors.InvalidArgument, match="num_tokens"):
        prefill.offer([1])
