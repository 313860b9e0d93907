"""A model with latents in place of keys and values arrives byte for byte.

Tokens are not compared: vLLM's attention over latents on a CPU computes the last token of a prompt in another way where
the others are there already, and with random weights that makes another answer. So it does with NixlConnector, and then
the same one as here.
"""

from __future__ import annotations

import pytest
from helpers.vllm_engine import find_blocks, read_blocks
from helpers.vllm_fleet import kvlink_connector, prefill, prompt, settled

#: What vLLM makes of any other on a CPU.
BLOCK_TOKENS = 16


@pytest.fixture(scope="module")
def engines(fleet):
    """A prefill and a decode engine."""
    started = [
        fleet.begin(name, kvlink_connector(), model="deepseek", block_size=BLOCK_TOKENS)
        for name in ("prefill", "decode")
    ]
    return [engine.wait_ready() for engine in started]


@pytest.mark.parametrize("tokens", [40, 65, 128, 513])
def test_latents_arrive_byte_for_byte(engines, tokens):
    source, target = engines
    free = [engine.state().free_blocks for engine in engines]
    asked = prompt(tokens, 1)
    offered = prefill(source, asked)
    contents = source.call(read_blocks, offered.kv["remote_block_ids"][0])
    assert target.call(find_blocks, contents) == [None] * len(contents[0])

    answer = target.ask(asked, 1, offered.kv).answer()

    assert answer.finish == "length"
    assert answer.first_step_tokens == 1
    # The last block has the last token, which decode computes once more.
    found = target.call(find_blocks, contents)[: (tokens - 1) // BLOCK_TOKENS]
    assert None not in found
    assert len(set(found)) == len(found)
    for engine, blocks in zip(engines, free, strict=True):
        settled(engine, free_blocks=blocks)
