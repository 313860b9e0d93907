"""The answer to a prompt that was computed elsewhere: that of one engine alone, and only because of its KV."""

from __future__ import annotations

import pytest
from helpers.vllm_engine import fault_counts, script_faults
from helpers.vllm_fleet import hand_off, kvlink_connector, prefill, prompt, settled, wait_for

LENGTHS = (40, 65, 128, 513)
#: Without a transfer the first step has the whole prompt; with one, at most the last tokens once more.
MOST_FIRST_TOKENS = 3
#: Each piece of a pull is posted up to so much later: it is under way, and will be.
FOR_EVER_MS = 600_000.0


@pytest.fixture(scope="module")
def engines(fleet):
    """Two engines that may do both, a third that checks what it pulls, and one without a connector."""
    started = [
        fleet.begin("both-0", kvlink_connector()),
        fleet.begin("both-1", kvlink_connector()),
        fleet.begin("checking", kvlink_connector("kv_consumer", integrity="crc32c")),
        fleet.begin("alone"),
    ]
    return [engine.wait_ready() for engine in started]


@pytest.fixture(autouse=True)
def nothing_is_left(engines):
    """Each test gives back all blocks, on both sides."""
    free = [engine.state().free_blocks for engine in engines]
    yield
    for engine, blocks in zip(engines, free, strict=True):
        settled(engine, free_blocks=blocks)


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("way", ["there", "back"])
def test_the_answer_is_that_of_one_engine_and_nothing_is_computed_twice(engines, tokens, way):
    source, target, _, alone = engines if way == "there" else (engines[1], engines[0], *engines[2:])
    expected = alone.ask(prompt(tokens)).answer()
    before = target.state()

    answer = hand_off(source, target, prompt(tokens))

    assert answer.tokens == expected.tokens
    assert answer.finish == "length"
    assert expected.first_step_tokens == tokens
    assert 1 <= answer.first_step_tokens <= MOST_FIRST_TOKENS
    after = settled(target, free_blocks=before.free_blocks)
    assert after.prompt_tokens["external_kv_transfer"] - before.prompt_tokens["external_kv_transfer"] == tokens
    assert after.prompt_tokens["local_compute"] == before.prompt_tokens["local_compute"]


def test_the_kv_of_another_prompt_makes_another_answer(engines):
    source, target, _, alone = engines
    mine, other = prompt(128, 1), prompt(128, 2)

    answer = target.ask(mine, 16, prefill(source, other).kv).answer()

    assert answer.finish == "length"
    assert answer.tokens != alone.ask(mine).answer().tokens


def test_a_bit_turned_on_the_way_changes_the_answer_of_an_engine_that_does_not_check(engines):
    source, target, _, alone = engines
    target.call(script_faults, corrupt=1.0, seed=3)

    answers = [hand_off(source, target, prompt(128, number)).tokens for number in range(4)]

    turned = target.call(fault_counts)["corrupted"]
    target.call(script_faults)
    assert turned > 0
    assert answers != [alone.ask(prompt(128, number)).answer().tokens for number in range(4)]


@pytest.mark.expects_warnings
def test_an_engine_that_checks_notices_a_turned_bit_and_computes_again(engines):
    source, _, checking, alone = engines
    checking.call(script_faults, corrupt=1.0, seed=3)
    asked = prompt(128, 5)

    answer = hand_off(source, checking, asked)

    turned = checking.call(fault_counts)["corrupted"]
    checking.call(script_faults)
    assert turned > 0
    assert answer.tokens == alone.ask(asked).answer().tokens
    assert answer.first_step_tokens > MOST_FIRST_TOKENS
    assert hand_off(source, checking, asked).first_step_tokens <= MOST_FIRST_TOKENS, "it goes on using the peer"


def test_a_request_without_a_hand_off_is_as_without_a_connector(engines):
    source, _, _, alone = engines
    answer, expected = source.ask(prompt(65, 9)).answer(), alone.ask(prompt(65, 9)).answer()
    assert answer.tokens == expected.tokens
    assert answer.kv is None


def test_no_process_is_bound_to_other_cores(engines):
    source, target, _, alone = engines
    assert source.state().affinity == target.state().affinity == alone.state().affinity


def test_idle_engines_do_nothing_and_while_they_wait_our_threads_sleep(engines):
    """While a request waits vLLM itself steps a thousand times a second; nothing of ours does."""
    source, target, _, alone = engines
    seconds = 2.0

    def spent(engine):
        before = engine.state()
        assert not engine.channel.poll(seconds), "nobody asked for anything"
        after = engine.state()
        ours = after.our_threads_cpu_s - before.our_threads_cpu_s
        return after.steps - before.steps, after.cpu_s - before.cpu_s, ours

    quiet = [spent(engine) for engine in (alone, source, target)]
    assert [steps for steps, _, _ in quiet] == [0, 0, 0]
    assert max(cpu for _, cpu, _ in quiet[1:]) <= quiet[0][1] + 0.01 * seconds, quiet

    target.call(script_faults, delay_ms=FOR_EVER_MS)
    waiting = target.ask(prompt(128, 11), 4, prefill(source, prompt(128, 11)).kv)
    wait_for(target, "WAITING_FOR_REMOTE_KVS")
    both = [spent(source), spent(target)]
    waiting.abort()
    target.call(script_faults)
    assert all(steps > 0 for steps, _, _ in both)
    assert max(ours for _, _, ours in both) <= 0.02 * seconds, both
