"""An engine that is killed costs the other one a bounded time, and none of its blocks."""

from __future__ import annotations

import itertools
import time

import pytest
from helpers.vllm_engine import script_faults
from helpers.vllm_fleet import hand_off, kvlink_connector, prefill, prompt, settled, wait_for

pytestmark = pytest.mark.expects_warnings

BOUND_S = 5.0
#: How long prefill keeps blocks for another decode engine, by default.
RETRY_S = 3.0
#: Longer than any test may take, so that no deadline helps.
PATIENT = {"deadline_s": 120.0, "ttl_s": 120.0}
#: Each piece of a pull is posted up to so much later: it is under way, and will be.
FOR_EVER_MS = 600_000.0


@pytest.fixture(scope="module")
def alone(fleet):
    """One engine without a connector, which knows the right answers."""
    return fleet.begin("alone").wait_ready()


@pytest.fixture(scope="module")
def decode(fleet):
    """A decode engine that outlives its prefill engines."""
    return fleet.begin("decode", kvlink_connector("kv_consumer", **PATIENT)).wait_ready()


_numbers = itertools.count()


@pytest.fixture
def source(fleet):
    """A prefill engine that the test may kill."""
    engine = fleet.begin(f"prefill-{next(_numbers)}", kvlink_connector("kv_producer", **PATIENT)).wait_ready()
    yield engine
    if engine.process.is_alive():
        fleet.kill(engine)


@pytest.fixture(autouse=True)
def decode_gets_its_blocks_back(decode):
    """Whatever has died."""
    free = decode.state().free_blocks
    yield
    settled(decode, free_blocks=free)


@pytest.mark.parametrize("known", [False, True], ids=["a-stranger", "a-known-peer"])
def test_prefill_dies_before_decode_has_asked(fleet, alone, decode, source, known):
    if known:
        hand_off(source, decode, prompt(65, 1))
    asked = prompt(128, 2)
    offered = prefill(source, asked)
    fleet.kill(source)

    started = time.monotonic()
    answer = decode.ask(asked, 16, offered.kv).answer()

    assert time.monotonic() - started < BOUND_S
    assert answer.tokens == alone.ask(asked).answer().tokens


def test_prefill_dies_while_decode_reads(fleet, alone, decode, source):
    asked = prompt(513, 3)
    decode.call(script_faults, delay_ms=FOR_EVER_MS)
    reading = decode.ask(asked, 16, prefill(source, asked).kv)
    wait_for(decode, "WAITING_FOR_REMOTE_KVS")

    fleet.kill(source)
    started = time.monotonic()
    answer = reading.answer()

    assert time.monotonic() - started < BOUND_S
    decode.call(script_faults)
    assert answer.tokens == alone.ask(asked).answer().tokens
    assert answer.first_step_tokens > 3


def test_prefill_dies_once_decode_has_everything(fleet, alone, decode, source):
    asked = prompt(128, 4)
    decoding = decode.ask(asked, 400, prefill(source, asked).kv)
    wait_for(decode, "RUNNING")
    fleet.kill(source)

    answer = decoding.answer()

    assert answer.tokens == alone.ask(asked, 400).answer().tokens
    assert answer.first_step_tokens <= 3


def test_decode_dies_while_it_reads(fleet, alone, source):
    """Another decode engine may be sent the request for a while, and not for as long as the lease would last."""
    free = source.state().free_blocks
    dying = fleet.begin("dying", kvlink_connector("kv_consumer", **PATIENT)).wait_ready()
    dying.call(script_faults, delay_ms=FOR_EVER_MS)
    asked = prompt(513, 5)
    dying.ask(asked, 16, prefill(source, asked).kv)
    wait_for(dying, "WAITING_FOR_REMOTE_KVS")
    source.channel.poll(1.5 * RETRY_S)
    assert source.state().free_blocks < free, "a reader that lives keeps the lease"

    fleet.kill(dying)

    settled(source, free_blocks=free, within_s=BOUND_S)
    assert source.ask(asked).answer().tokens == alone.ask(asked).answer().tokens


def test_the_next_prefill_engine_is_served_as_the_first(alone, decode, source):
    asked = prompt(128, 6)
    answer = hand_off(source, decode, asked)
    assert answer.tokens == alone.ask(asked).answer().tokens
    assert answer.first_step_tokens <= 3
