"""A client that goes away leaves nothing behind, whatever state its request is in."""

from __future__ import annotations

import pytest
from helpers.vllm_engine import script_faults
from helpers.vllm_fleet import PREFILL, hand_off, kvlink_connector, prefill, prompt, settled, wait_for

pytestmark = pytest.mark.expects_warnings

PATIENT = {"deadline_s": 120.0, "ttl_s": 120.0}
#: Each piece of a pull is posted up to so much later: it is under way, and will be.
FOR_EVER_MS = 600_000.0
#: At the prefill engine a prompt takes many steps, so that there is time to abort it in the middle.
STEP_TOKENS = 64


@pytest.fixture(scope="module")
def engines(fleet):
    """Prefill in chunks, decode one request at a time, and an engine that knows the right answers."""
    started = [
        fleet.begin("prefill", kvlink_connector("kv_producer", **PATIENT), max_num_batched_tokens=STEP_TOKENS),
        fleet.begin("decode", kvlink_connector("kv_consumer", **PATIENT), max_num_seqs=1),
        fleet.begin("alone"),
    ]
    return [engine.wait_ready() for engine in started]


@pytest.fixture(autouse=True)
def nothing_is_left_and_all_goes_on(engines):
    """Both sides have their blocks back within five seconds, and serve the next request as any other."""
    source, target, alone = engines
    free = [engine.state().free_blocks for engine in engines]
    yield
    target.call(script_faults)
    for engine, blocks in zip(engines, free, strict=True):
        settled(engine, free_blocks=blocks, within_s=5.0)
    asked = prompt(65, 50)
    answer = hand_off(source, target, asked)
    assert answer.tokens == alone.ask(asked).answer().tokens
    assert answer.first_step_tokens <= 3


def test_while_prefill_computes(engines):
    source = engines[0]
    under_way = source.ask(prompt(900, 1), 1, dict(PREFILL))
    wait_for(source, "RUNNING")
    under_way.abort()


def test_before_decode_has_a_place_for_it(engines):
    """It was prefilled, and waits behind another one at the decode engine: prefill must hear that nobody will come."""
    source, target, _ = engines
    busy = target.ask(prompt(40, 2), 600)
    wait_for(target, "RUNNING")
    waiting = target.ask(prompt(128, 3), 16, prefill(source, prompt(128, 3)).kv)
    assert "WAITING" in target.state().statuses
    waiting.abort()
    busy.abort()


def test_while_decode_reads(engines):
    source, target, _ = engines
    target.call(script_faults, delay_ms=FOR_EVER_MS)
    reading = target.ask(prompt(513, 4), 16, prefill(source, prompt(513, 4)).kv)
    wait_for(target, "WAITING_FOR_REMOTE_KVS")
    reading.abort()


def test_while_decode_reads_slowly(engines):
    """Some has arrived, some is under way, and some has not been asked for."""
    source, target, _ = engines
    target.call(script_faults, delay_ms=1500.0, seed=2)
    reading = target.ask(prompt(513, 5), 16, prefill(source, prompt(513, 5)).kv)
    wait_for(target, "WAITING_FOR_REMOTE_KVS")
    reading.abort()


def test_while_decode_writes(engines):
    source, target, _ = engines
    writing = target.ask(prompt(128, 6), 600, prefill(source, prompt(128, 6)).kv)
    wait_for(target, "RUNNING")
    writing.abort()
