"""Many requests at once, some of whose clients go away."""

from __future__ import annotations

import os
import random
import time

import pytest
from helpers.vllm_fleet import PREFILL, kvlink_connector, prompt, read_any, settled

pytestmark = pytest.mark.expects_warnings

REQUESTS = int(os.environ.get("KVLINK_VLLM_REQUESTS", "100"))
AT_ONCE = 8
ABORTED = 0.1
LENGTHS = (40, 65, 128, 200, 513)
LIMIT_S = 200.0
LEASE_S = 10.0


@pytest.fixture(scope="module")
def engines(fleet):
    """Two engines, both of which prefill and decode, and one alone."""
    started = [fleet.begin(f"both-{number}", kvlink_connector(ttl_s=LEASE_S)) for number in range(2)] + [
        fleet.begin("alone")
    ]
    return [engine.wait_ready() for engine in started]


class Client:
    """One request on its way from one engine to the other. It may go away at either, after a while."""

    def __init__(self, source, target, asked, draw):
        self.target = target
        self.asked = asked
        self.prefilling = source.ask(asked, 1, dict(PREFILL))
        self.decoding = None
        self.answer = None
        leaves = draw.random() < ABORTED
        self._leaves_at = time.monotonic() + draw.uniform(0.0, 0.3) if leaves else None
        self.aborted = False

    def go_on(self):
        """Do the next step, if something has come; return whether it is over."""
        under_way = self.decoding or self.prefilling
        if self._leaves_at is not None and time.monotonic() >= self._leaves_at and not under_way.done:
            # Between two engines there is nothing to abort; the decode engine hears of the request and of its end.
            under_way.abort()
            self.aborted = True
            return True
        if not under_way.done:
            return False
        answer = under_way.answer()
        if self.decoding is not None:
            self.answer = answer
            return True
        self.decoding = self.target.ask(self.asked, 16, answer.kv)
        return False


@pytest.mark.slow
def test_a_hundred_requests_are_right_and_leave_nothing_behind(engines):
    first, second, alone = engines
    free = [engine.state().free_blocks for engine in engines]
    draw = random.Random(20)
    prompts = [prompt(draw.choice(LENGTHS), number % 20) for number in range(REQUESTS)]
    distinct = {tuple(asked) for asked in prompts}
    expected = {asked: alone.ask(list(asked)).answer().tokens for asked in distinct}

    waiting, live, over = list(enumerate(prompts)), [], []
    end = time.monotonic() + LIMIT_S
    while waiting or live:
        assert time.monotonic() < end, f"{len(over)} of {REQUESTS} after {LIMIT_S} s"
        while waiting and len(live) < AT_ONCE:
            number, asked = waiting.pop()
            pair = (first, second) if number % 2 else (second, first)
            live.append(Client(*pair, asked, draw))
        read_any(first, second, timeout_s=0.05)
        ended = [client for client in live if client.go_on()]
        live = [client for client in live if client not in ended]
        over += ended

    answered = [client for client in over if not client.aborted]
    assert len(over) == REQUESTS
    assert len(answered) < REQUESTS, "some went away"
    assert all(client.answer.tokens == expected[tuple(client.asked)] for client in answered)
    assert all(client.answer.first_step_tokens for client in answered)
    for engine, blocks in zip(engines, free, strict=True):
        # A client that went away between the engines is one of whom decode never heard: there, the lease has to end.
        settled(engine, free_blocks=blocks, within_s=LEASE_S + 5.0)
