"""Engines of one rank and of two: heads or layers are split on one side, and put together on the other."""

from __future__ import annotations

import pytest
from helpers.vllm_fleet import EngineDied, hand_off, kvlink_connector, prompt, settled

pytestmark = pytest.mark.slow

TWO_RANKS = {"distributed_executor_backend": "mp"}
SPLIT = {
    "heads": {"tensor_parallel_size": 2} | TWO_RANKS,
    "layers": {"pipeline_parallel_size": 2} | TWO_RANKS,
}
WAYS = {"heads-joined": ("heads", None), "heads-split": (None, "heads"), "layers-joined": ("layers", None)}


def skip_without_pipelines(fleet, environment):
    """Skip if this vLLM runs no pipeline here, with or without a connector; 0.32 does not on a CPU."""
    bare = fleet.begin("pipeline", environment=environment, **SPLIT["layers"])
    try:
        bare.wait_ready().ask(prompt(40)).answer()
    except EngineDied as error:
        fleet.kill(bare)
        pytest.skip(f"this vLLM runs no pipeline of two ranks here, without any connector: {str(error)[-200:]}")
    fleet.stop(bare)


@pytest.fixture(scope="module", params=WAYS.values(), ids=WAYS.keys())
def engines(request, fleet):
    """A prefill and a decode engine, one of which has two ranks, and one alone."""
    options = [SPLIT.get(kind, {}) for kind in request.param]
    name = "-".join(str(kind) for kind in request.param)
    environment = {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    if "layers" in request.param:
        skip_without_pipelines(fleet, environment)
    started = [
        fleet.begin(f"{name}-{number}", kvlink_connector(), environment=environment, **chosen)
        for number, chosen in enumerate(options)
    ]
    started.append(fleet.begin(f"{name}-alone"))
    yield [engine.wait_ready() for engine in started]
    for engine in started:
        fleet.stop(engine)


@pytest.mark.parametrize("tokens", [40, 65, 128, 513])
def test_the_answer_is_that_of_one_rank(engines, tokens):
    source, target, alone = engines
    free = [engine.state().free_blocks for engine in (source, target)]
    asked = prompt(tokens, 1)

    answer = hand_off(source, target, asked)

    assert answer.tokens == alone.ask(asked).answer().tokens
    assert answer.first_step_tokens <= 3
    settled(source, free_blocks=free[0])
    settled(target, free_blocks=free[1])
