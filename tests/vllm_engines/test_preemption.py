"""A decode engine with too few blocks for all it has begun starts some of it again, and all answers stay right."""

from __future__ import annotations

import pytest
from helpers.vllm_fleet import kvlink_connector, prefill, prompt, settled

PROMPT_TOKENS = 128
NEW_TOKENS = 200
#: For two requests at full length and a bit, in place of four.
BLOCKS = 28


@pytest.fixture(scope="module")
def engines(fleet):
    """Prefill, decode with few blocks, and one alone."""
    started = [
        fleet.begin("prefill", kvlink_connector("kv_producer")),
        fleet.begin("decode", kvlink_connector("kv_consumer"), num_gpu_blocks_override=BLOCKS, max_model_len=512),
        fleet.begin("alone"),
    ]
    return [engine.wait_ready() for engine in started]


def test_what_is_preempted_is_begun_again(engines):
    source, target, alone = engines
    free = [engine.state().free_blocks for engine in (source, target)]
    prompts = [prompt(PROMPT_TOKENS, number) for number in range(4)]
    expected = [alone.ask(asked, NEW_TOKENS) for asked in prompts]
    expected = [asked.answer().tokens for asked in expected]

    decoding = [target.ask(asked, NEW_TOKENS, prefill(source, asked).kv) for asked in prompts]
    answers = [asked.answer() for asked in decoding]

    assert [answer.tokens for answer in answers] == expected
    state = settled(target, free_blocks=free[1])
    settled(source, free_blocks=free[0])
    assert state.prompt_tokens["external_kv_transfer"] >= PROMPT_TOKENS
    assert state.preemptions > 0, "it was to have too few blocks"
