"""One real handoff over each of two lanes between two processes: run by the Python of an environment with kvlink in it.

``python installed_smoke.py`` is the target and starts itself as the source. It uses what is installed, not the tree.
"""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np

import kvlink
from kvlink.transport import find_ucx, open_ucx

SHAPE = (2, 8, 16, 2, 64)
BLOCKS = (6, 1, 4)
TOKENS = 16 * len(BLOCKS)
LANES = ("mapped", "staged")
TIMEOUT_S = 60.0


def new_node(name: str) -> tuple[kvlink.Node, np.ndarray, object]:
    """A node over memory of its own."""
    owner = kvlink.empty(SHAPE, "float32")
    tensor = np.frombuffer(owner, np.float32).reshape(SHAPE)
    cache = kvlink.KVCache.from_tensors({"layers.0": tensor}, axes="kv block token head dim", block_tokens=16)
    return kvlink.Node(cache, name=name, secret="smoke"), tensor, owner


def offer() -> None:
    """Be the source: print a ticket for each lane, and stay until there is nothing more to read."""
    node, tensor, _owner = new_node("source")
    tensor[:] = np.random.default_rng(7).standard_normal(SHAPE, np.float32)
    with node:
        offers = [node.offer(BLOCKS, num_tokens=TOKENS, ttl_s=TIMEOUT_S) for _ in LANES]
        print(json.dumps([one.ticket for one in offers]), flush=True)
        sys.stdin.read()


def pull() -> None:
    """Be the target: start the source, pull, and compare every byte."""
    expected = np.random.default_rng(7).standard_normal(SHAPE, np.float32)
    source = subprocess.Popen([sys.executable, __file__, "offer"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert source.stdin is not None
    assert source.stdout is not None
    node, tensor, _owner = new_node("target")
    with node:
        for lane, ticket in zip(LANES, json.loads(source.stdout.readline()), strict=True):
            tensor[:] = 0
            pulled = node.pull(ticket, [2, 0, 5], require=lane, deadline_s=TIMEOUT_S).wait(timeout_s=TIMEOUT_S)
            assert pulled.lane == lane
            assert np.array_equal(tensor[:, [2, 0, 5]], expected[:, list(BLOCKS)]), lane
            assert not tensor[:, [1, 3, 4, 6, 7]].any(), lane
    source.stdin.close()
    assert source.wait(timeout=TIMEOUT_S) == 0
    context = open_ucx(listen_host="127.0.0.1")
    version = context.version if context is not None else "none"
    print(f"kvlink {kvlink.__version__}, UCX {version} from {find_ucx().path}, lanes {', '.join(LANES)}: right")


if __name__ == "__main__":
    offer() if sys.argv[1:] == ["offer"] else pull()
