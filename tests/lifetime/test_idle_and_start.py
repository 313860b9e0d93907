"""What a node costs when it does nothing, and how fast the first one is up."""

from __future__ import annotations

import os
import select
import time

import pytest
from helpers.markers import LANES
from helpers.patterns import Geometry, Placement, Request
from helpers.processes import Pair, run_python

IDLE_S = 10.0
#: A machine that is busy with something else is given several chances.
MOST_TRIES = 10
REQUEST = Request(source_blocks=(6, 1, 4), target_blocks=(0, 7, 3), num_tokens=11)


def cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_idle_nodes_use_less_than_one_percent_of_a_core(spawn) -> None:
    """A node alone, a connected pair with a live offer, and a pair on TCP: all at once."""
    alone = spawn()
    alone.call("open", Geometry(), Placement(), seed=1)
    pairs = [Pair(spawn(lane.env), spawn(lane.env), lane) for lane in (LANES[0], LANES[-1])]
    for pair in pairs:
        pair.open()
        pair.hand_over(REQUEST)
        pair.offer(REQUEST, ttl_s=60)
    workers = [alone, *(worker for pair in pairs for worker in (pair.source, pair.target))]

    before = [cpu_seconds(worker.pid) for worker in workers]
    began = time.monotonic()
    select.select([], [], [], IDLE_S)  # the thing measured is time in which nothing happens
    used = [cpu_seconds(worker.pid) - start for worker, start in zip(workers, before, strict=True)]
    elapsed_s = time.monotonic() - began

    assert max(used) < 0.01 * elapsed_s, dict(
        zip(("alone", "source", "target", "tcp source", "tcp target"), used, strict=True)
    )


@pytest.mark.alone
def test_the_first_node_is_up_in_150_ms() -> None:
    code = """
import time
import numpy as np
import kvlink
tensor = np.zeros((2, 8, 4, 2, 8), "float32")
began = time.perf_counter()
cache = kvlink.KVCache.from_tensors({"a": tensor}, axes="kv block token head dim", block_tokens=4)
node = kvlink.Node(cache, name="first")
print(time.perf_counter() - began)
"""
    tries: list[float] = []
    while not tries or (min(tries) >= 0.150 and len(tries) < MOST_TRIES):
        tries.append(float(run_python(code).stdout))
    assert min(tries) < 0.150, tries


@pytest.mark.alone
def test_import_adds_less_than_150_ms_and_nothing_heavy() -> None:
    def seconds(code: str) -> float:
        began = time.perf_counter()
        assert run_python(code).returncode == 0
        return time.perf_counter() - began

    fastest_s = {code: min(seconds(code) for _ in range(5)) for code in ("pass", "import kvlink")}
    assert fastest_s["import kvlink"] - fastest_s["pass"] < 0.150
    loaded = run_python("import sys, kvlink; print(*sys.modules)").stdout.split()
    heavy = {"torch", "transformers", "cupy", "ucxx", "vllm", "sglang", "numpy", "msgspec", "kvlink._native"}
    assert not heavy & set(loaded)


def test_import_leaves_the_environment_and_the_signals_alone() -> None:
    code = """
import os, signal, threading
before = dict(os.environ), [signal.getsignal(number) for number in signal.valid_signals()], threading.active_count()
import kvlink
after = dict(os.environ), [signal.getsignal(number) for number in signal.valid_signals()], threading.active_count()
assert before == after
"""
    ended = run_python(code)
    assert ended.returncode == 0, ended.stderr


def test_a_node_sets_no_environment_variable() -> None:
    code = """
import os
import numpy as np
import kvlink
before = dict(os.environ)
tensor = np.zeros((2, 8, 4, 2, 8), "float32")
cache = kvlink.KVCache.from_tensors({"a": tensor}, axes="kv block token head dim", block_tokens=4)
with kvlink.Node(cache, name="first"):
    pass
assert dict(os.environ) == before
"""
    ended = run_python(code)
    assert ended.returncode == 0, ended.stderr
