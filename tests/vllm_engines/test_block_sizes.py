"""Blocks of 64 tokens at one engine and of 32 at the other: the answer is right, or the pull is refused and says why.

A CPU's attention packs the tokens of a block together, so that half a block of 64 is no block of 32: kvlink refuses.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.vllm_fleet import hand_off, kvlink_connector, prompt, settled

pytestmark = pytest.mark.expects_warnings

#: Whom the source refuses cannot tell it that nobody will come, so that its blocks are free when the lease ends.
LEASE_S = 2.0


@pytest.fixture(scope="module")
def engines(fleet):
    """One engine for each size, both may do both."""
    started = {
        size: fleet.begin(f"blocks-{size}", kvlink_connector(ttl_s=LEASE_S), block_size=size) for size in (32, 64)
    }
    return {size: engine.wait_ready() for size, engine in started.items()}


@pytest.mark.parametrize(("source_tokens", "target_tokens"), [(32, 64), (64, 32)])
@pytest.mark.parametrize("tokens", [65, 513])
def test_unequal_blocks_never_make_a_wrong_answer(engines, source_tokens, target_tokens, tokens):
    source, target = engines[source_tokens], engines[target_tokens]
    free = [engine.state().free_blocks for engine in (source, target)]
    asked = prompt(tokens, source_tokens)
    expected = source.ask(asked).answer()

    answer = hand_off(source, target, asked)

    assert answer.tokens == expected.tokens
    if answer.first_step_tokens > 3:
        said = [line for line in Path(target.start.log).read_text().splitlines() if "kvlink: pull" in line]
        assert said, "the prompt was computed again, and nobody said why"
        assert "block" in said[-1], said[-1]
    settled(source, free_blocks=free[0], within_s=LEASE_S + 3.0)
    settled(target, free_blocks=free[1])
