"""Prefill pushes each layer to a decode engine that was asked at the same time."""

from __future__ import annotations

import itertools
import socket
import time

import pytest
from helpers.vllm_fleet import PREFILL, kvlink_connector, prompt, settled, wait_for

pytestmark = pytest.mark.expects_warnings

#: Shorter prompts are pushed in one piece, when they are computed.
THRESHOLD_TOKENS = 100
PUSHING = {"push": True, "push_threshold_tokens": THRESHOLD_TOKENS}
_transfers = itertools.count()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def port():
    """Where the prefill engine listens: the router must know."""
    return free_port()


@pytest.fixture(scope="module")
def engines(fleet, port):
    """A prefill engine that computes 64 tokens a step, a decode engine, and one alone."""
    listening = kvlink_connector("kv_producer", listen=f"127.0.0.1:{port}", **PUSHING)
    started = [
        fleet.begin("prefill", listening, max_num_batched_tokens=64),
        fleet.begin("decode", kvlink_connector("kv_consumer", **PUSHING)),
        fleet.begin("alone"),
    ]
    return [engine.wait_ready() for engine in started]


@pytest.fixture(autouse=True)
def nothing_is_left(engines):
    """Both sides have their blocks back."""
    free = [engine.state().free_blocks for engine in engines]
    yield
    for engine, blocks in zip(engines, free, strict=True):
        settled(engine, free_blocks=blocks)


def both_sides(port):
    """The parameters of the two requests, as a router makes them."""
    transfer = f"transfer-{next(_transfers)}"
    there = {"do_remote_prefill": True, "do_remote_decode": False, "remote_host": "127.0.0.1", "remote_port": port}
    return PREFILL | {"transfer_id": transfer}, there | {"transfer_id": transfer}


@pytest.mark.parametrize("tokens", [40, 65, 128, 513])
@pytest.mark.parametrize("first", ["decode-first", "prefill-first"])
def test_the_answer_is_that_of_one_engine(engines, port, tokens, first):
    source, target, alone = engines
    asked = prompt(tokens, 1)
    ours, theirs = both_sides(port)
    if first == "decode-first":
        decoding = target.ask(asked, 16, theirs)
        wait_for(target, "WAITING_FOR_REMOTE_KVS")
        prefilling = source.ask(asked, 1, ours)
    else:
        prefilling = source.ask(asked, 1, ours)
        decoding = target.ask(asked, 16, theirs)

    answer = decoding.answer()

    assert prefilling.answer().kv["transfer_mode"] == "push"
    assert answer.tokens == alone.ask(asked).answer().tokens
    assert 1 <= answer.first_step_tokens <= 3


def test_two_requests_alike_do_not_mix(engines, port):
    """Whoever pushes finds its own peer by the id of the transfer, not by the request."""
    source, target, alone = engines
    asked = [prompt(200, number) for number in (2, 3)]
    sides = [both_sides(port) for _ in asked]
    decoding = [target.ask(tokens, 16, theirs) for tokens, (_, theirs) in zip(asked, sides, strict=True)]
    for tokens, (ours, _) in reversed(list(zip(asked, sides, strict=True))):
        source.ask(tokens, 1, ours)
    for tokens, request in zip(asked, decoding, strict=True):
        assert request.answer().tokens == alone.ask(tokens).answer().tokens


def test_decode_goes_away_while_prefill_computes(engines, port):
    source, target, _ = engines
    ours, theirs = both_sides(port)
    decoding = target.ask(prompt(900, 4), 16, theirs)
    wait_for(target, "WAITING_FOR_REMOTE_KVS")
    prefilling = source.ask(prompt(900, 4), 1, ours)
    wait_for(source, "RUNNING")
    decoding.abort()
    assert prefilling.answer().finish == "length"


def test_prefill_goes_away_while_it_computes(engines, port):
    source, target, alone = engines
    ours, theirs = both_sides(port)
    asked = prompt(900, 5)
    decoding = target.ask(asked, 16, theirs)
    wait_for(target, "WAITING_FOR_REMOTE_KVS")
    prefilling = source.ask(asked, 1, ours)
    wait_for(source, "RUNNING")
    prefilling.abort()
    started = time.monotonic()
    answer = decoding.answer()
    assert time.monotonic() - started < 5.0
    assert answer.tokens == alone.ask(asked).answer().tokens
