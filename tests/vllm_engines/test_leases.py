"""Prefill may use its blocks for others once a lease is over: decode hears of it, and never decodes with theirs."""

from __future__ import annotations

import os
import signal
import time

import pytest
from helpers.vllm_engine import script_faults
from helpers.vllm_fleet import hand_off, kvlink_connector, prefill, prompt, settled, wait_for

pytestmark = pytest.mark.expects_warnings

#: A short lease that readers cannot keep alive for longer.
SHORT = {"ttl_s": 1.5, "lease_cap_s": 1.5}
#: So few blocks at the prefill engine that the next prompts need those of the last.
FEW = {"num_gpu_blocks_override": 24, "max_model_len": 700}


@pytest.fixture(scope="module")
def engines(fleet):
    """A prefill engine with short leases and few blocks, a decode engine for each policy, and one alone."""
    started = [
        fleet.begin("prefill", kvlink_connector("kv_producer", **SHORT), **FEW),
        fleet.begin("recompute", kvlink_connector("kv_consumer")),
        fleet.begin("fail", kvlink_connector("kv_consumer", policy="fail")),
        fleet.begin("alone"),
    ]
    return dict(zip(("prefill", "recompute", "fail", "alone"), [one.wait_ready() for one in started], strict=True))


def overwrite_all_blocks(engine):
    """Let an engine with so few blocks use each of them for something else."""
    for number in range(2):
        engine.ask(prompt(600, 100 + number), 1).answer()


def judge(engines, policy, answer, asked):
    if policy == "fail":
        assert (answer.finish, answer.tokens) == ("error", [])
    else:
        assert answer.finish == "length"
        assert answer.tokens == engines["alone"].ask(asked).answer().tokens


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_lease_that_ended_before_decode_came_is_noticed(engines, policy):
    source, target = engines["prefill"], engines[policy]
    free = [engine.state().free_blocks for engine in (source, target)]
    asked = prompt(513, 1)
    offered = prefill(source, asked)
    settled(source, free_blocks=free[0])
    overwrite_all_blocks(source)

    started = time.monotonic()
    answer = target.ask(asked, 16, offered.kv).answer()

    assert time.monotonic() - started < 5.0
    judge(engines, policy, answer, asked)
    settled(source, free_blocks=free[0])
    settled(target, free_blocks=free[1])


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_lease_that_ends_while_decode_reads_is_noticed(engines, policy):
    """Decode is stopped with its pull under way: what it reads afterwards is of the prompts that came later."""
    source, target = engines["prefill"], engines[policy]
    free = [engine.state().free_blocks for engine in (source, target)]
    asked = prompt(513, 2)
    offered = prefill(source, asked)
    target.call(script_faults, delay_ms=300.0, seed=1)
    reading = target.ask(asked, 16, offered.kv)
    wait_for(target, "WAITING_FOR_REMOTE_KVS")
    os.kill(target.pid, signal.SIGSTOP)
    try:
        settled(source, free_blocks=free[0])
        overwrite_all_blocks(source)
    finally:
        os.kill(target.pid, signal.SIGCONT)

    answer = reading.answer()

    target.call(script_faults)
    judge(engines, policy, answer, asked)
    settled(source, free_blocks=free[0])
    settled(target, free_blocks=free[1])


def test_in_time_all_is_well(engines):
    """The control: the same engines, when nothing is late."""
    asked = prompt(513, 3)
    answer = hand_off(engines["prefill"], engines["fail"], asked)
    assert answer.tokens == engines["alone"].ask(asked).answer().tokens
    assert answer.first_step_tokens <= 3
