"""Stage 4 and a half: placing requests among many decode workers."""

import asyncio
import random

import numpy as np
import pytest

import kvlink
from kvlink.scheduler import LeastLoaded, MostRoom, PrefixAffinity


@pytest.mark.parametrize("workers", [10, 100, 1000])
@pytest.mark.parametrize("policy", [MostRoom, LeastLoaded, PrefixAffinity])
def test_placing_a_request_and_giving_it_back(benchmark, policy, workers):
    tensor = np.zeros((2, 8, 4, 2, 8), dtype="float32")
    cache = kvlink.KVCache.from_tensors({"layer": tensor}, axes="kv block token head dim", block_tokens=4)
    rng = random.Random(3)
    known = [
        kvlink.DecodeWorker(name=f"decode-{number}", free_blocks=rng.randrange(64, 512), hand_off=print)
        for number in range(workers)
    ]
    with kvlink.Node(cache, name="prefill", copy_threads=1) as node:
        scheduler = kvlink.Scheduler(node, workers=known, policy=policy())

        async def place_and_release():
            for request in range(100):
                scheduler.release(await scheduler.place(num_tokens=200, prefix_hashes=(request % 7, request)))

        # A hundred at a time, since starting a loop costs more than all of them.
        benchmark.pedantic(lambda: asyncio.run(place_and_release()), rounds=20, warmup_rounds=1)
