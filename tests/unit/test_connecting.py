"""Nodes find each other, and strangers neither get in nor keep anybody out. The engines are fakes."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from unit.fake_engine import FakeEngine, wait_until

import kvlink
from kvlink import errors, wire
from kvlink.handoff import handshake, running

MakeNode = Callable[..., kvlink.Node]


def cache(head_dim: int = 8) -> kvlink.KVCache:
    tensor = np.zeros((2, 8, 4, 2, head_dim), dtype="float32")
    return kvlink.KVCache.from_tensors({"layers.0": tensor}, axes="kv block token head dim", block_tokens=4)


def engine_of(node: kvlink.Node) -> FakeEngine:
    return FakeEngine.by_epoch[bytes.fromhex(node.epoch)]


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def make_node(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeNode]:
    monkeypatch.setattr(running, "start_engine", lambda cache, epoch, settings, **_: FakeEngine(epoch=epoch))
    nodes: list[kvlink.Node] = []

    def make(name: str = "node", *, of: kvlink.KVCache | None = None, **options: Any) -> kvlink.Node:
        nodes.append(kvlink.Node(of or cache(), name=name, copy_threads=1, **options))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()
    FakeEngine.by_epoch.clear()


def test_a_pull_connects_by_itself_and_the_next_one_finds_the_connection(make_node: MakeNode) -> None:
    source, target = make_node("source", secret="s"), make_node("target", secret=b"s")
    for _ in range(3):
        offer = source.offer([1, 2], num_tokens=7, payload=b"first token")
        pull = target.pull(offer.ticket, [0, 3])
        assert pull.wait(timeout_s=5).payload == b"first token"
        assert offer.wait(timeout_s=5) is offer
        assert (offer.poll(), pull.poll(), pull.error, pull.id) == (True, True, None, offer.id)
    facts = engine_of(target).sources
    assert len(facts) == 1
    assert facts[1]["name"] == "source"
    assert facts[1]["epoch"].hex() == source.epoch
    assert facts[1]["pid"] == os.getpid()
    assert facts[1]["same_host"] is True
    assert len(facts[1]["region_fds"]) == len(facts[1]["region_addresses"]) == 1
    wait_until(lambda: source.counters().get("connections: accepted") == 1)
    (claimant,) = engine_of(source).claimants
    assert claimant["name"] == "target"
    assert os.get_blocking(claimant["fd"]) is False


def test_many_pulls_at_once_share_one_connection(make_node: MakeNode) -> None:
    source, target = make_node("source"), make_node("target")
    tickets = [source.offer([1], num_tokens=1).ticket for _ in range(32)]
    start = threading.Barrier(len(tickets))
    pulls: list[Any] = []

    def pull(ticket: Any) -> None:
        start.wait(timeout=5)
        pulls.append(target.pull(ticket, [0]))

    threads = [threading.Thread(target=pull, args=(ticket,)) for ticket in tickets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=5)
    for one in pulls:
        one.wait(timeout_s=5)
    wait_until(lambda: source.counters().get("connections: accepted") == 1)
    assert len(engine_of(target).sources) == len(engine_of(source).claimants) == 1


def test_a_lost_connection_is_made_again_by_the_next_pull(make_node: MakeNode) -> None:
    source, target = make_node("source"), make_node("target")
    target.pull(source.offer([1], num_tokens=1).ticket, [0]).wait(timeout_s=5)
    target.drop_peer("source")
    assert engine_of(target).failures[1][0] == "PeerLost"
    target.pull(source.offer([1], num_tokens=1).ticket, [0]).wait(timeout_s=5)
    assert len(engine_of(target).sources) == 2


@pytest.mark.expects_warnings
@pytest.mark.parametrize(("ours", "theirs"), [("right", "wrong"), ("right", None), (None, "wrong")])
def test_a_wrong_secret_is_an_authentication_failure(make_node: MakeNode, ours: Any, theirs: Any) -> None:
    source, target = make_node("source", secret=ours), make_node("target", secret=theirs)
    pull = target.pull(source.offer([1], num_tokens=1).ticket, [0])
    with pytest.raises(errors.AuthenticationFailed, match=r"connect to source .*give both nodes the same one"):
        pull.wait(timeout_s=5)
    wait_until(lambda: source.counters().get("connections: AuthenticationFailed") == 1)
    assert engine_of(source).claimants == []


def test_caches_that_cannot_be_paired_are_refused_with_both_values(make_node: MakeNode) -> None:
    source, target = make_node("source", of=cache(8)), make_node("target", of=cache(16))
    with pytest.raises(errors.LayoutMismatch, match=r"connect to source .*8.*16"):
        target.pull(source.offer([1], num_tokens=1).ticket, [0]).wait(timeout_s=5)
    assert engine_of(source).claimants == []
    assert engine_of(target).sources == {}


def test_a_ticket_of_an_earlier_life_is_stale(make_node: MakeNode) -> None:
    source, target = make_node("source"), make_node("target")
    ticket = source.offer([1], num_tokens=1).ticket
    source.close()
    reborn = make_node("source", listen=source.address)
    assert reborn.address == source.address
    with pytest.raises(errors.StalePeer, match="restarted"):
        target.pull(ticket, [0]).wait(timeout_s=5)


def test_a_node_that_is_gone_is_unreachable_at_once(make_node: MakeNode) -> None:
    source, target = make_node("source"), make_node("target")
    ticket = source.offer([1], num_tokens=1).ticket
    source.close()
    began = time.monotonic()
    with pytest.raises(errors.PeerUnreachable, match=r"connect to source .*refused.*is the node still running"):
        target.pull(ticket, [0], deadline_s=10).wait(timeout_s=5)
    assert time.monotonic() - began < 2


def test_a_peer_that_does_not_answer_is_unreachable_before_the_deadline(make_node: MakeNode) -> None:
    """The longest deadline of all that wait counts, as far as the limits allow."""
    target = make_node("target", limits=kvlink.Limits(connect_timeout_s=1.0))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ticket = _ticket_at(silent)
        began = time.monotonic()
        short = target.pull(ticket, [0], deadline_s=0.2)
        long = target.pull(ticket, [1], deadline_s=0.6)
        with pytest.raises(errors.PeerUnreachable, match="did not answer in time"):
            long.wait(timeout_s=5)
        assert 0.3 < time.monotonic() - began < 0.6
        assert isinstance(short.error, errors.PeerUnreachable)
        began = time.monotonic()
        with pytest.raises(errors.PeerUnreachable):
            target.pull(ticket, [0], deadline_s=60).wait(timeout_s=5)
        assert 0.9 < time.monotonic() - began < 2


def test_too_many_unconnected_peers_are_busy(make_node: MakeNode) -> None:
    target = make_node("target", limits=kvlink.Limits(pending_connects=2))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for number in range(2):
            target.pull(_ticket_at(silent, epoch=bytes([number] * 16)), [0], deadline_s=5)
        with pytest.raises(errors.Busy, match="limits.pending_connects"):
            target.pull(_ticket_at(silent, epoch=bytes([9] * 16)), [0], deadline_s=5)
        target.close()
    assert all(pull.released for pull in engine_of(target).pulls)


def test_a_dialer_that_gives_up_while_it_is_welcomed_says_nothing_more(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it said would reach the source's engine, as bytes that are no control message."""
    source, target = make_node("source"), make_node("target")
    receive = handshake.receive

    def impatient(link: Any, kind: Any) -> Any:
        if kind is wire.Welcome:
            assert engine_of(source).attached.wait(timeout=5)
            raise errors.DeadlineExceeded("it takes too long")
        return receive(link, kind)

    monkeypatch.setattr(handshake, "receive", impatient)
    pull = target.pull(source.offer(blocks=[0], num_tokens=4).ticket, blocks=[1])
    with pytest.raises(errors.KvlinkError):
        pull.wait(timeout_s=5)
    with socket.socket(fileno=os.dup(engine_of(source).claimants[0]["fd"])) as attached:
        attached.settimeout(5)
        with contextlib.suppress(ConnectionResetError):  # it has hung up without reading its welcome
            assert attached.recv(4096) == b""


def _ticket_at(listener: socket.socket, epoch: bytes = bytes(16)) -> dict[str, Any]:
    from kvlink.handoff.ticket import TicketSource, make_ticket

    address = f"127.0.0.1:{listener.getsockname()[1]}"
    return make_ticket(
        epoch=epoch,
        sequence=1,
        sources=[TicketSource(name="silent", address=address, epoch=epoch.hex())],
        num_tokens=1,
        groups=["full"],
        readers=1,
        ttl_ms=1000,
    )


@pytest.mark.parametrize("knock", [b"", b"\x10\0\0\0half", b"\0" * 4096], ids=["silence", "half", "garbage"])
def test_strangers_at_the_door_keep_nobody_out(make_node: MakeNode, knock: bytes) -> None:
    source = make_node("source", limits=kvlink.Limits(pending_handshakes=8))
    target = make_node("target")
    place = source.address.rpartition(":")
    strangers = [socket.create_connection((place[0], int(place[2])), timeout=5) for _ in range(40)]
    for stranger in strangers:
        stranger.sendall(knock)
    began = time.monotonic()
    target.pull(source.offer([1], num_tokens=1).ticket, [0]).wait(timeout_s=5)
    assert time.monotonic() - began < 3
    for stranger in strangers:
        stranger.close()
    wait_until(lambda: sum(source.counters()[key] for key in source.counters() if "connections" in key) == 42)


def test_the_slow_are_cut_off_and_counted(make_node: MakeNode) -> None:
    source = make_node("source", limits=kvlink.Limits(handshake_timeout_s=0.2))
    place = source.address.rpartition(":")
    with socket.create_connection((place[0], int(place[2])), timeout=5) as slow:
        slow.sendall(b"\x10")
        wait_until(lambda: source.counters().get("connections: DeadlineExceeded") == 1)
        assert slow.recv(4096)[:4] != b""  # it is told why
        assert slow.recv(4096) == b""


@pytest.mark.expects_warnings
def test_no_outcome_of_connecting_leaks_a_descriptor_or_a_thread(make_node: MakeNode) -> None:
    source, target = make_node("source", secret="s"), make_node("target", secret="s")
    wrong = make_node("wrong", secret="t")
    unlike = make_node("unlike", of=cache(16), secret="s")
    at_rest = threading.active_count()

    def meet_all() -> None:
        ticket = source.offer([1], num_tokens=1).ticket
        for node in (wrong, unlike):
            with pytest.raises(errors.KvlinkError):
                node.pull(ticket, [0]).wait(timeout_s=5)
        place = source.address.rpartition(":")
        socket.create_connection((place[0], int(place[2])), timeout=5).close()

    def all_met(times: int) -> bool:
        """Whether their connections have ended, and their threads: a layout that cannot be paired is asked for once."""
        ended = sum(count for name, count in source.counters().items() if name.startswith("connections"))
        target_and_its_pools, unlike_layout = 2, 1
        return ended == target_and_its_pools + unlike_layout + 2 * times and threading.active_count() == at_rest

    target.pull(source.offer([1], num_tokens=1).ticket, [0]).wait(timeout_s=5)
    meet_all()
    wait_until(lambda: all_met(1))
    before = descriptors()
    for _ in range(10):
        meet_all()
    wait_until(lambda: all_met(11) and descriptors() == before)


def test_closing_is_idempotent_from_any_thread_and_ends_what_waits(make_node: MakeNode) -> None:
    before = descriptors(), threading.active_count()
    node = make_node("node")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        pull = node.pull(_ticket_at(silent), [0], deadline_s=60)
        offer = node.offer([1], num_tokens=1)
        seen: list[BaseException] = []
        waiting = threading.Thread(target=lambda: seen.append(_error_of(lambda: offer.wait(timeout_s=30))))
        waiting.start()
        closers = [threading.Thread(target=node.close) for _ in range(4)]
        for closer in closers:
            closer.start()
        for thread in [*closers, waiting]:
            thread.join(timeout=5)
            assert not thread.is_alive()
    node.close()
    assert [type(error) for error in seen] == [errors.Closed]
    assert isinstance(pull.error, errors.Closed)
    for use in (lambda: node.offer([1], num_tokens=1), lambda: node.fileno(), lambda: node.peers()):
        with pytest.raises(errors.Closed, match="node is closed"):
            use()
    wait_until(lambda: (descriptors(), threading.active_count()) == before)


def _error_of(action: Callable[[], Any]) -> BaseException:
    try:
        action()
    except errors.KvlinkError as error:
        return error
    raise AssertionError("it succeeded")


def test_a_forgotten_node_is_closed_and_a_handle_keeps_it(make_node: MakeNode) -> None:
    node = kvlink.Node(cache(), name="forgotten", copy_threads=1)
    engine = engine_of(node)
    offer = node.offer([1], num_tokens=1)
    del node
    gc.collect()
    assert engine.closed is False
    del offer
    gc.collect()
    assert engine.closed is True


def test_a_node_that_cannot_start_leaves_nothing_behind(make_node: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    before = descriptors(), threading.active_count()

    def broken(*_: Any, **__: Any) -> Any:
        raise errors.OutOfMemory("no thread")

    with pytest.raises(errors.ConfigError, match="cannot listen"), socket.create_server(("127.0.0.1", 0)) as taken:
        make_node(listen=f"127.0.0.1:{taken.getsockname()[1]}")
    monkeypatch.setattr(running, "start_engine", broken)
    with pytest.raises(errors.OutOfMemory):
        make_node()
    assert (descriptors(), threading.active_count()) == before


def test_in_a_forked_child_every_call_says_so_and_the_parent_goes_on(make_node: MakeNode) -> None:
    source, target = make_node("source"), make_node("target")
    offer = source.offer([1], num_tokens=1)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        said = [str(_error_of(use)) for use in (lambda: source.offer([1], num_tokens=1), offer.wait, offer.cancel)]
        source.close()
        os.write(writing, "\n".join(said).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read().splitlines()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(said) == 3
    assert all("fork" in line for line in said)
    target.pull(offer.ticket, [0]).wait(timeout_s=5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"listen": "0.0.0.0:0"}, "secret"),
        ({"listen": "0.0.0.0:0", "secret": "s"}, "advertise"),
        ({"listen": "localhost"}, "host:port"),
        ({"listen": 7}, "text"),
        ({"advertise": "a b"}, "advertise"),
        ({"lanes": ["pigeon"]}, "mapped"),
        ({"lanes": []}, "mapped"),
        ({"secret": ""}, "secret"),
        ({"limits": 3}, "Limits"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_name(make_node: MakeNode, options: dict[str, Any], said: str) -> None:
    with pytest.raises(errors.ConfigError, match=said):
        make_node(**options)


@pytest.mark.parametrize(
    ("options", "host"),
    [
        ({"listen": "[::1]:0"}, "[::1]"),
        ({"listen": "localhost:0"}, "localhost"),
        ({"listen": "0.0.0.0:0", "secret": "s", "advertise": "127.0.0.1"}, "127.0.0.1"),
        ({"advertise": "prefill-0.cluster:7777"}, "prefill-0.cluster"),
        ({"advertise": "::1"}, "[::1]"),
    ],
)
def test_tickets_name_what_others_can_reach(make_node: MakeNode, options: dict[str, Any], host: str) -> None:
    node = make_node("source", **options)
    (source,) = node.offer([1], num_tokens=1).ticket["sources"]
    assert source == {"name": "source", "address": node.address, "epoch": node.epoch}
    assert node.address.rpartition(":")[0] == host
    assert int(node.address.rpartition(":")[2]) > 0


def test_pulls_over_ipv6_and_by_name_connect(make_node: MakeNode) -> None:
    target = make_node("target")
    for listen in ("[::1]:0", "localhost:0"):
        source = make_node("source", listen=listen)
        target.pull(source.offer([1], num_tokens=1).ticket, [0]).wait(timeout_s=5)


@pytest.mark.expects_warnings
def test_the_operator_is_told_of_a_wrong_secret_once(make_node: MakeNode, caplog: pytest.LogCaptureFixture) -> None:
    source, target = make_node("source", secret="s"), make_node("target", secret="t")
    with caplog.at_level(logging.WARNING, logger="kvlink"):
        for _ in range(3):
            pull = target.pull(source.offer([1], num_tokens=1).ticket, [0])
            with pytest.raises(errors.AuthenticationFailed):
                pull.wait(timeout_s=5)
        wait_until(lambda: source.counters().get("connections: AuthenticationFailed") == 3)
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


def test_running_out_of_descriptors_is_a_pause_and_no_end(make_node: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = make_node("source"), make_node("target")
    accept = socket.socket.accept
    refusals = [OSError(24, "Too many open files")] * 2

    def refusing(listener: socket.socket) -> Any:
        if refusals:
            raise refusals.pop()
        return accept(listener)

    monkeypatch.setattr(running.Acceptor, "_warn_once", lambda *_: None)
    monkeypatch.setattr(socket.socket, "accept", refusing)
    target.pull(source.offer([1], num_tokens=1).ticket, [0]).wait(timeout_s=5)
    assert source.counters()["connections: out of descriptors"] == 2
