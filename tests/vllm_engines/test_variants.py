"""Engines of many kinds: each answers what it answers alone, and decode does not compute the prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from helpers.vllm_fleet import hand_off, kvlink_connector, prefill, prompt, settled

LENGTHS = (40, 65, 128, 513)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What two engines are started with."""

    model: str = "llama"
    source: dict[str, Any] = field(default_factory=dict)
    target: dict[str, Any] = field(default_factory=dict)
    both: dict[str, Any] = field(default_factory=dict)
    #: Tokens that decode may compute of a prompt.
    most_first: int = 3


VARIANTS = {
    "chunked-prefill": Variant(source={"max_num_batched_tokens": 64}),
    "prefix-caching-on-both": Variant(both={"enable_prefix_caching": True}),
    "fp8": Variant(both={"kv_cache_dtype": "fp8", "dtype": "bfloat16"}),
    "bfloat16": Variant(both={"dtype": "bfloat16"}),
    "gemma": Variant(model="gemma"),
}


@pytest.fixture(scope="module", params=VARIANTS.values(), ids=VARIANTS.keys())
def engines(request, fleet):
    """A prefill and a decode engine of each variant."""
    variant = request.param
    if variant.both.get("kv_cache_dtype") == "fp8" and "avx512f" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("vLLM keeps KV as fp8 only on a CPU with AVX-512")
    name = next(name for name, known in VARIANTS.items() if known is variant)
    started = [
        fleet.begin(f"{name}-prefill", kvlink_connector(), model=variant.model, **variant.both | variant.source),
        fleet.begin(f"{name}-decode", kvlink_connector(), model=variant.model, **variant.both | variant.target),
    ]
    source, target = (engine.wait_ready() for engine in started)
    yield source, target, variant
    for engine in started:
        fleet.stop(engine)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_the_answer_is_that_of_one_engine(engines, tokens):
    source, target, variant = engines
    free = [engine.state().free_blocks for engine in (source, target)]
    asked = prompt(tokens, 1)
    expected = source.ask(asked).answer()

    answer = hand_off(source, target, asked)

    assert answer.tokens == expected.tokens
    assert answer.first_step_tokens <= variant.most_first
    settled(source, free_blocks=free[0])
    settled(target, free_blocks=free[1])


def test_another_prompts_kv_makes_another_answer(engines):
    """The control: this kind of engine does decode with what it was handed."""
    source, target, _ = engines
    expected = source.ask(prompt(128, 2)).answer()
    answer = target.ask(prompt(128, 2), 16, prefill(source, prompt(128, 3)).kv).answer()
    assert answer.finish == "length"
    assert answer.tokens != expected.tokens
