"""A ticket over several ranks: all are met before any is joined, and each is told its share. The engines are fakes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from unit.fake_engine import FakeEngine, wait_until

import kvlink
from kvlink import errors
from kvlink.handoff import connect, gather, outgoing, running

MakeNode = Callable[..., kvlink.Node]
HEADS = 8


def cache(heads: range = range(HEADS), *, layers: tuple[str, ...] = ("a", "b"), dims: int = 8) -> kvlink.KVCache:
    tensors = {layer: np.zeros((2, 8, 4, len(heads), dims), dtype="float32") for layer in layers}
    return kvlink.KVCache.from_tensors(
        tensors, axes="kv block token head dim", block_tokens=4, heads=heads, total_kv_heads=HEADS
    )


def ranks_of(degree: int) -> list[kvlink.KVCache]:
    share = HEADS // degree
    return [cache(range(rank * share, (rank + 1) * share)) for rank in range(degree)]


def engine_of(node: kvlink.Node) -> FakeEngine:
    return FakeEngine.by_epoch[bytes.fromhex(node.epoch)]


@pytest.fixture
def make_node(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeNode]:
    monkeypatch.setattr(running, "start_engine", lambda cache, epoch, settings, **_: FakeEngine(epoch=epoch))
    nodes: list[kvlink.Node] = []

    def make(name: str, of: kvlink.KVCache, **options: Any) -> kvlink.Node:
        nodes.append(kvlink.Node(of, name=name, copy_threads=1, **options))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()
    FakeEngine.by_epoch.clear()


class Engine:
    """The ranks of a prefill engine, and the mint of its scheduler."""

    def __init__(self, make_node: MakeNode, caches: list[kvlink.KVCache], **options: Any) -> None:
        self.ranks = [make_node(f"rank-{number}", each, **options) for number, each in enumerate(caches)]
        self.mint = kvlink.TicketMint([rank.descriptor for rank in self.ranks])

    def offer(self, **options: Any) -> dict[str, Any]:
        ticket = self.mint.offer(num_tokens=7, **options)
        named = {source["name"] for source in ticket["sources"]}
        for rank in self.ranks:
            if rank.name in named:
                rank.offer([1, 2], ticket=ticket, payload=rank.name.encode())
        return ticket

    def connections(self) -> list[int]:
        return [rank.counters().get("connections: accepted", 0) for rank in self.ranks]


def shares_of(node: kvlink.Node) -> dict[str, int]:
    """Bytes that a token brings over each connection of `node`, by the source's name."""
    sources = engine_of(node).sources.values()
    return {facts["name"]: facts["template"].token_bytes("full") for facts in sources}


def test_ranks_are_claimed_together_and_met_once(make_node: MakeNode) -> None:
    prefill = Engine(make_node, ranks_of(4), secret="s")
    target = make_node("decode", cache(), secret="s")
    for _ in range(3):
        pull = target.pull(prefill.offer(), [3, 4])
        assert pull.wait(timeout_s=5).payload == b"rank-0"
    wait_until(lambda: prefill.connections() == [1, 1, 1, 1])
    whole = 2 * 2 * HEADS * 8 * 4  # layers, components, heads, dims, bytes
    assert shares_of(target) == {f"rank-{number}": whole // 4 for number in range(4)}
    for rank in prefill.ranks:
        (claimant,) = engine_of(rank).claimants
        assert claimant["template"].token_bytes("full") == whole // 4


def test_a_replica_that_nobody_needs_is_claimed_for_nothing(make_node: MakeNode) -> None:
    prefill = Engine(make_node, [cache(), cache(), cache()])
    target = make_node("decode", cache())
    target.pull(prefill.offer(), [3, 4]).wait(timeout_s=5)
    shares = sorted(shares_of(target).values())
    assert shares[:2] == [0, 0]
    assert shares[2] > 0
    reasons = [peer["lane_reason"] for peer in target.peers()]
    assert sum("nothing to move" in reason for reason in reasons) == 2


def test_readers_spread_over_replicas(make_node: MakeNode) -> None:
    prefill = Engine(make_node, [cache(), cache()])
    busy = set()
    for number in range(24):
        target = make_node(f"decode-{number}", cache())
        target.pull(prefill.offer(), [3, 4]).wait(timeout_s=5)
        busy |= {name for name, share in shares_of(target).items() if share}
        target.close()
    assert busy == {"rank-0", "rank-1"}


def test_the_payload_is_that_of_the_first_rank_named(make_node: MakeNode) -> None:
    prefill = Engine(make_node, ranks_of(2))
    target = make_node("decode", cache())
    assert target.pull(prefill.offer(ranks=[1, 0]), [3, 4]).wait(timeout_s=5).payload == b"rank-1"


def test_a_known_layout_is_not_asked_for_again(make_node: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same ranks in another order are another set, and need connections, but no layouts."""
    prefill = Engine(make_node, ranks_of(2))
    target = make_node("decode", cache())
    target.pull(prefill.offer(), [3, 4]).wait(timeout_s=5)

    def meet(*_: Any) -> Any:
        raise AssertionError("it knows the layouts")

    monkeypatch.setattr(connect.Connector, "meet", meet)
    target.pull(prefill.offer(ranks=[1, 0]), [3, 4]).wait(timeout_s=5)


def test_many_pulls_at_once_share_the_connections(make_node: MakeNode) -> None:
    prefill = Engine(make_node, ranks_of(2))
    target = make_node("decode", cache())
    tickets = [prefill.offer() for _ in range(16)]
    start = threading.Barrier(len(tickets))
    pulls: list[kvlink.Pull] = []

    def pull(ticket: Any) -> None:
        start.wait(timeout=5)
        pulls.append(target.pull(ticket, [3, 4]))

    threads = [threading.Thread(target=pull, args=(ticket,)) for ticket in tickets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=5)
    for one in pulls:
        one.wait(timeout_s=5)
    wait_until(lambda: prefill.connections() == [1, 1])


def test_a_lost_rank_alone_is_dialed_again(make_node: MakeNode) -> None:
    prefill = Engine(make_node, ranks_of(4))
    target = make_node("decode", cache())
    target.pull(prefill.offer(), [3, 4]).wait(timeout_s=5)
    target.drop_peer("rank-1")
    target.pull(prefill.offer(), [3, 4]).wait(timeout_s=5)
    wait_until(lambda: prefill.connections() == [1, 2, 1, 1])


def test_one_rank_that_is_gone_fails_the_pull_and_names_itself(make_node: MakeNode) -> None:
    prefill = Engine(make_node, ranks_of(4))
    target = make_node("decode", cache())
    ticket = prefill.offer()
    prefill.ranks[1].close()
    began = time.monotonic()
    with pytest.raises(errors.PeerUnreachable, match=r"connect to rank-1 .*refused"):
        target.pull(ticket, [3, 4], deadline_s=30).wait(timeout_s=10)
    assert time.monotonic() - began < 5
    wait_until(lambda: engine_of(target).states and set(engine_of(target).states.values()) == {"lost"})
    # The others have served nobody, so they serve a ticket that does without the one.
    with pytest.raises(errors.LayoutMismatch, match="heads"):
        target.pull(prefill.mint.offer(num_tokens=7, ranks=[0, 2]), [3, 4]).wait(timeout_s=5)
    replicated = make_node("narrow", cache(range(0, 2)))
    ticket = prefill.mint.offer(num_tokens=7, ranks=[0, 2])
    for number in (0, 2):
        prefill.ranks[number].offer([1, 2], ticket=ticket)
    replicated.pull(ticket, [3, 4]).wait(timeout_s=5)


def test_one_rank_of_another_life_is_stale(make_node: MakeNode) -> None:
    caches = ranks_of(2)
    prefill = Engine(make_node, caches)
    target = make_node("decode", cache())
    ticket = prefill.offer()
    prefill.ranks[1].close()
    make_node("rank-1", caches[1], listen=prefill.ranks[1].address)
    with pytest.raises(errors.StalePeer, match=r"connect to rank-1 .*restarted"):
        target.pull(ticket, [3, 4]).wait(timeout_s=5)


def test_one_rank_that_is_silent_is_unreachable_before_the_deadline(make_node: MakeNode) -> None:
    prefill = Engine(make_node, ranks_of(2))
    target = make_node("decode", cache())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        dumb = {**prefill.ranks[1].descriptor, "address": address, "epoch": bytes(16).hex(), "name": "dumb"}
        ticket = kvlink.TicketMint([prefill.ranks[0].descriptor, dumb]).offer(num_tokens=7)
        began = time.monotonic()
        with pytest.raises(errors.PeerUnreachable, match=r"connect to dumb .*did not answer in time"):
            target.pull(ticket, [3, 4], deadline_s=0.5).wait(timeout_s=5)
        assert time.monotonic() - began < 1.5


def test_a_name_that_takes_long_to_look_up_holds_up_no_report(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = Engine(make_node, ranks_of(2))
    target = make_node("decode", cache())
    lost = {**prefill.ranks[1].descriptor, "address": "lost.cluster:7000", "epoch": bytes(16).hex()}
    ticket = kvlink.TicketMint([prefill.ranks[0].descriptor, lost]).offer(num_tokens=7)
    prefill.ranks[0].close()
    found = threading.Event()
    resolve = outgoing.resolve

    def slow(address: tuple[str, int]) -> Any:
        if address[0] == "lost.cluster":
            found.wait(timeout=10)
            raise errors.PeerUnreachable("the name is not known")
        return resolve(address)

    monkeypatch.setattr(outgoing, "resolve", slow)
    began = time.monotonic()
    with pytest.raises(errors.PeerUnreachable, match="connect to rank-0 .*refused"):
        target.pull(ticket, [3, 4], deadline_s=30).wait(timeout_s=5)
    assert time.monotonic() - began < 2
    found.set()
    wait_until(lambda: not [one for one in threading.enumerate() if one.name == "kvlink-connect"])


@pytest.mark.expects_warnings
def test_one_rank_with_another_secret_is_an_authentication_failure(make_node: MakeNode) -> None:
    caches = ranks_of(2)
    ranks = [make_node("right", caches[0], secret="s"), make_node("wrong", caches[1], secret="t")]
    target = make_node("decode", cache(), secret="s")
    ticket = kvlink.TicketMint([rank.descriptor for rank in ranks]).offer(num_tokens=7)
    with pytest.raises(errors.AuthenticationFailed, match="connect to wrong"):
        target.pull(ticket, [3, 4]).wait(timeout_s=5)
    assert engine_of(ranks[0]).claimants == []


@pytest.mark.parametrize(
    ("caches", "field", "source_value", "target_value"),
    [
        ([cache(range(0, 4)), cache(range(6, 8))], "heads", "0..3, 6..7 of 8", "0..7 of 8"),
        ([cache(layers=("a",)), cache(layers=("c",))], "layers", "a, c", "a, b"),
        ([cache(), cache(dims=16)], "head_dim", "16", "8"),
    ],
    ids=["heads", "layers", "head-dim"],
)
def test_ranks_that_cannot_serve_together_are_refused_with_both_values(
    make_node: MakeNode, caches: list[kvlink.KVCache], field: str, source_value: str, target_value: str
) -> None:
    prefill = Engine(make_node, caches)
    target = make_node("decode", cache())
    pull = target.pull(prefill.offer(), [3, 4])
    with pytest.raises(errors.LayoutMismatch, match=r"connect to rank-0 .*, rank-1 .*differs?:") as caught:
        pull.wait(timeout_s=5)
    assert (caught.value.field, caught.value.source_value, caught.value.target_value) == (
        field,
        source_value,
        target_value,
    )
    assert engine_of(target).sources == {}
    for rank in prefill.ranks:  # each is told, and keeps nothing
        wait_until(lambda rank=rank: rank.counters().get("connections: LayoutMismatch") == 1)


def test_a_set_that_failed_is_tried_anew_by_the_next_pull(make_node: MakeNode) -> None:
    caches = ranks_of(2)
    prefill = Engine(make_node, caches)
    target = make_node("decode", cache())
    ticket = prefill.offer()
    prefill.ranks[1].close()
    with pytest.raises(errors.PeerUnreachable):
        target.pull(ticket, [3, 4]).wait(timeout_s=5)
    reborn = make_node("rank-1", caches[1], listen=prefill.ranks[1].address)
    again = kvlink.TicketMint([prefill.ranks[0].descriptor, reborn.descriptor]).offer(num_tokens=7)
    for rank in (prefill.ranks[0], reborn):
        rank.offer([1, 2], ticket=again)
    target.pull(again, [3, 4]).wait(timeout_s=5)


def test_dropping_a_rank_calls_off_the_set_that_waits_for_it(make_node: MakeNode) -> None:
    prefill = Engine(make_node, ranks_of(2))
    target = make_node("decode", cache())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        dumb = {**prefill.ranks[1].descriptor, "address": address, "epoch": bytes(16).hex(), "name": "dumb"}
        ticket = kvlink.TicketMint([prefill.ranks[0].descriptor, dumb]).offer(num_tokens=7)
        pull = target.pull(ticket, [3, 4], deadline_s=30)
        target.drop_peer("dumb")
        with pytest.raises(errors.PeerLost, match="decode dropped the peer dumb"):
            pull.wait(timeout_s=5)


def test_many_ranks_are_dialed_a_few_at_a_time(make_node: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """40 ranks are admitted together though they are more than the limit on peers being dialed."""
    monkeypatch.setattr(gather, "_MOST_AT_ONCE", 4)
    layers = tuple(f"layer-{number}" for number in range(40))
    prefill = Engine(make_node, [cache(layers=(layer,)) for layer in layers])
    target = make_node("decode", cache(layers=layers), limits=kvlink.Limits(pending_connects=2))
    most = 0
    meet = connect.Connector.meet
    lock, running_now = threading.Lock(), 0

    def counted(*arguments: Any) -> Any:
        nonlocal most, running_now
        with lock:
            running_now += 1
            most = max(most, running_now)
        try:
            return meet(*arguments)
        finally:
            with lock:
                running_now -= 1

    monkeypatch.setattr(connect.Connector, "meet", counted)
    target.pull(prefill.offer(), [3, 4], deadline_s=60).wait(timeout_s=60)
    wait_until(lambda: prefill.connections() == [1] * 40)
    assert 1 < most <= 4


def test_without_threads_for_helpers_one_does_it_all(make_node: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = Engine(make_node, ranks_of(4))
    target = make_node("decode", cache())
    ticket = prefill.offer()
    start = threading.Thread.start

    def refusing(thread: threading.Thread) -> None:
        if thread.name == "kvlink-connect" and threading.current_thread().name == "kvlink-connect":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refusing)
    target.pull(ticket, [3, 4]).wait(timeout_s=5)


def test_without_any_thread_the_pull_is_refused(make_node: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = Engine(make_node, ranks_of(2))
    target = make_node("decode", cache())
    ticket = prefill.offer()

    def refusing(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refusing)
        with pytest.raises(errors.OutOfMemory, match="can't start new thread"):
            target.pull(ticket, [3, 4])
    target.pull(ticket, [3, 4]).wait(timeout_s=5)


def test_closing_ends_what_is_being_met(make_node: MakeNode) -> None:
    prefill = Engine(make_node, ranks_of(2))
    target = make_node("decode", cache())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        dumb = {**prefill.ranks[1].descriptor, "address": address, "epoch": bytes(16).hex()}
        ticket = kvlink.TicketMint([prefill.ranks[0].descriptor, dumb]).offer(num_tokens=7)
        pull = target.pull(ticket, [3, 4], deadline_s=30)
        began = time.monotonic()
        target.close()
        assert time.monotonic() - began < 2
        assert isinstance(pull.error, errors.Closed)
    wait_until(lambda: not [one for one in threading.enumerate() if one.name == "kvlink-connect"])
