"""Nodes ask each other: who may, what comes back, and what nobody can hold up. The engines are fakes."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from helpers import dialect_0
from unit.fake_engine import FakeEngine, wait_until

import kvlink
from kvlink import errors, wire
from kvlink.handoff import handshake, running
from kvlink.handoff.answer import Question
from kvlink.handoff.deadline import Deadline
from kvlink.handoff.framed_socket import FramedSocket

MakeNode = Callable[..., kvlink.Node]


@pytest.fixture
def make_node(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeNode]:
    monkeypatch.setattr(running, "start_engine", lambda cache, epoch, settings, **_: FakeEngine(epoch=epoch))
    nodes: list[kvlink.Node] = []

    def make(name: str, **options: Any) -> kvlink.Node:
        tensor = np.zeros((2, 8, 4, 2, 8), dtype="float32")
        cache = kvlink.KVCache.from_tensors({"layers.0": tensor}, axes="kv block token head dim", block_tokens=4)
        nodes.append(kvlink.Node(cache, name=name, copy_threads=1, **options))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()
    FakeEngine.by_epoch.clear()


def ask_at(node: kvlink.Node, peer: kvlink.Node, kind: str = "echo", body: bytes = b"", **options: Any) -> bytes:
    options.setdefault("deadline_s", 5.0)
    return node._running.ask(peer.address, kind, body, **options)


def answer_at(node: kvlink.Node, handler: Callable[[Question], bytes], kind: str = "echo") -> None:
    node._running.answerer.register(kind, handler)


def test_one_node_answers_another_that_knows_its_secret(make_node: MakeNode) -> None:
    asked, asker = make_node("asked", secret="s"), make_node("asker", secret="s")
    seen: list[Question] = []

    def echo(question: Question) -> bytes:
        seen.append(question)
        return question.body[::-1]

    answer_at(asked, echo)
    large = os.urandom(512 << 10)
    assert ask_at(asker, asked, body=b"abc") == b"cba"
    assert ask_at(asker, asked, body=large, epoch=bytes.fromhex(asked.epoch)) == large[::-1]
    assert (seen[0].name, seen[0].address, seen[0].epoch.hex()) == ("asker", asker.address, asker.epoch)
    assert 0 < seen[0].deadline.remaining_s <= 5.0


def test_a_connection_is_kept_for_the_next_question_and_made_anew_once_it_is_gone(make_node: MakeNode) -> None:
    asked, asker = make_node("asked"), make_node("asker")
    answer_at(asked, lambda question: str(threading.get_ident()).encode())
    first = ask_at(asker, asked)
    assert all(ask_at(asker, asked) == first for _ in range(20))
    asked._running.answerer.end_sessions(Deadline(5.0))
    assert ask_at(asker, asked) != b""
    wait_until(lambda: asked.counters().get("connections: accepted", 0) == 1)  # the first; the second is open still


def test_connections_to_a_life_that_has_ended_are_let_go_of(make_node: MakeNode) -> None:
    """Nobody asks a node that was killed again, so nobody would ever look at them."""
    asker = make_node("asker")
    for _ in range(5):
        asked = make_node("asked")
        answer_at(asked, lambda question: b"")
        ask_at(asker, asked, epoch=bytes.fromhex(asked.epoch))
        asked.close()
    assert len(asker._running.life.asker._idle) == 1


@pytest.mark.expects_warnings
def test_whoever_does_not_know_the_secret_is_told_nothing(make_node: MakeNode) -> None:
    asked, asker = make_node("asked", secret="right"), make_node("asker", secret="wrong")
    answer_at(asked, lambda question: pytest.fail("a stranger was answered"))
    with pytest.raises(errors.AuthenticationFailed, match="echo"):
        ask_at(asker, asked)


def test_an_error_of_the_answerer_reaches_the_asker_as_what_it_is_and_the_session_lives_on(
    make_node: MakeNode,
) -> None:
    asked, asker = make_node("asked"), make_node("asker")

    def refuse(question: Question) -> bytes:
        raise errors.NotOffered("there is none left")

    answer_at(asked, refuse, "refuse")
    answer_at(asked, lambda question: b"fine")
    with pytest.raises(errors.NotOffered, match="there is none left"):
        ask_at(asker, asked, "refuse")
    with pytest.raises(errors.ProtocolError, match=r"asked knows no question of kind 'unheard'"):
        ask_at(asker, asked, "unheard")
    assert ask_at(asker, asked) == b"fine"
    assert asked.counters().get("connections: accepted", 0) == 0  # all on one session, which is open still


@pytest.mark.expects_warnings
def test_a_fault_in_an_answer_is_told_as_such(make_node: MakeNode) -> None:
    asked, asker = make_node("asked"), make_node("asker")
    answer_at(asked, lambda question: bytes(1 // 0))
    with pytest.raises(errors.TransportFailed, match="ZeroDivisionError"):
        ask_at(asker, asked)


def test_a_slow_answer_holds_up_neither_other_questions_nor_other_peers(make_node: MakeNode) -> None:
    asked, asker, other = make_node("asked"), make_node("asker"), make_node("other")
    entered, leave = threading.Event(), threading.Event()

    def slow(question: Question) -> bytes:
        entered.set()
        assert leave.wait(timeout=10)
        return b"late"

    answer_at(asked, slow, "slow")
    answer_at(asked, lambda question: b"soon")
    answers: list[bytes] = []
    thread = threading.Thread(target=lambda: answers.append(ask_at(asker, asked, "slow")))
    thread.start()
    assert entered.wait(timeout=5)
    assert ask_at(asker, asked) == ask_at(other, asked) == b"soon"
    with pytest.raises(errors.DeadlineExceeded, match="slow"):
        ask_at(other, asked, "slow", deadline_s=0.05)
    assert answers == []
    leave.set()
    thread.join(timeout=5)
    assert answers == [b"late"]


def test_a_node_in_another_life_is_stale_and_one_that_is_gone_unreachable(make_node: MakeNode) -> None:
    asked, asker = make_node("asked"), make_node("asker")
    with pytest.raises(errors.StalePeer, match="asked"):
        ask_at(asker, asked, epoch=bytes(16))
    asked.close()
    with pytest.raises(errors.PeerUnreachable, match="is the node still running"):
        ask_at(asker, asked)
    with pytest.raises(errors.InvalidArgument, match="not host:port"):
        asker._running.ask("nowhere", "echo", b"", deadline_s=1.0)


def test_a_node_that_is_suspended_answers_nothing_and_asks_nothing(make_node: MakeNode) -> None:
    asked, asker = make_node("asked"), make_node("asker")
    answer_at(asked, lambda question: b"fine")
    assert ask_at(asker, asked) == b"fine"
    asked.suspend(deadline_s=0)
    with pytest.raises(errors.NotReady, match="suspended"):
        ask_at(asker, asked)
    with pytest.raises(errors.NotReady, match="suspended"):
        ask_at(asked, asker)


def test_closing_the_asked_node_ends_a_question_under_way_and_so_does_closing_the_asker(make_node: MakeNode) -> None:
    asked, asker, other = make_node("asked"), make_node("asker"), make_node("other")
    entered = threading.Semaphore(0)

    def slow(question: Question) -> bytes:
        entered.release()
        while True:
            threading.Event().wait(question.deadline.slice_s())

    answer_at(asked, slow)
    failures: dict[str, BaseException] = {}

    def ask_from(node: kvlink.Node) -> None:
        try:
            ask_at(node, asked, deadline_s=60.0)
        except errors.KvlinkError as error:
            failures[node.name] = error

    threads = [threading.Thread(target=ask_from, args=(node,)) for node in (asker, other)]
    for thread in threads:
        thread.start()
    assert entered.acquire(timeout=5)
    assert entered.acquire(timeout=5)
    asker.close()
    threads[0].join(timeout=5)
    asked.close()
    threads[1].join(timeout=5)
    assert isinstance(failures["asker"], errors.Closed)
    assert isinstance(failures["other"], errors.Closed | errors.PeerLost)


def test_at_the_limit_an_idle_peer_makes_room_and_busy_ones_do_not(make_node: MakeNode) -> None:
    asked = make_node("asked", limits=kvlink.Limits(ask_sessions=1))
    first, second = make_node("first"), make_node("second")
    entered, leave = threading.Event(), threading.Event()

    def slow(question: Question) -> bytes:
        entered.set()
        assert leave.wait(timeout=10)
        return b"late"

    answer_at(asked, slow, "slow")
    answer_at(asked, lambda question: b"soon")
    assert ask_at(first, asked) == ask_at(second, asked) == ask_at(first, asked) == b"soon"
    thread = threading.Thread(target=lambda: ask_at(first, asked, "slow"))
    thread.start()
    assert entered.wait(timeout=5)
    with pytest.raises(errors.Busy, match="asked is being asked by 1 peers"):
        ask_at(second, asked)
    leave.set()
    thread.join(timeout=5)


def test_a_node_of_an_older_version_cannot_be_asked(make_node: MakeNode) -> None:
    asked, asker = make_node("asked"), make_node("asker")
    undo = dialect_0.speak([0])
    try:
        with pytest.raises(errors.VersionMismatch, match=r"asked speaks a version that cannot be asked"):
            ask_at(asker, asked)
    finally:
        undo()


def test_what_is_too_large_is_not_sent_and_a_dialer_that_says_nothing_costs_a_bounded_time(
    make_node: MakeNode,
) -> None:
    asked = make_node("asked", limits=kvlink.Limits(handshake_timeout_s=0.05))
    asker = make_node("asker")
    with pytest.raises(errors.InvalidArgument, match="can be asked"):
        ask_at(asker, asked, body=bytes((512 << 10) + 1))
    host, _, port = asked.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as silent:
        assert silent.recv(1 << 16) is not None  # told off, or hung up
    wait_until(lambda: asked.counters().get("connections: DeadlineExceeded") == 1)


@pytest.mark.parametrize("rubbish", [b"\xc1", b"\x80", wire.encode(wire.Answer(number=0)), bytes(600 << 10)])
def test_what_is_no_question_ends_that_session_and_no_other(make_node: MakeNode, rubbish: bytes) -> None:
    asked, asker = make_node("asked"), make_node("asker")
    answer_at(asked, lambda question: b"fine")
    host, _, port = asked.address.rpartition(":")
    link = FramedSocket(socket.create_connection((host, int(port)), timeout=5), Deadline(5.0))
    try:
        handshake.prove(link, (b"",))
        handshake.receive(link, wire.IntroduceSource)
        handshake.send(link, wire.IntroduceAsker(epoch=bytes(16), name="hostile", address="127.0.0.1:1"))
        link.send(rubbish)
        with pytest.raises(errors.ProtocolError, match="refused"):
            handshake.receive(link, wire.Answer)
    finally:
        link.close()
    wait_until(lambda: asked.counters().get("connections: ProtocolError") == 1)
    assert ask_at(asker, asked) == b"fine"
