"""Full attention, a sliding window and state in one cache: pieces of a push move what one pull moves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvlink

TOKENS = 22
WINDOW = 6
LAYERS = ("full.0", "full.1", "window.0", "state.0")


class Side:
    """A node whose memory is full of the seed's bytes, and what is in it."""

    def __init__(self, name: str, *, seed: int, block_tokens: int) -> None:
        rng = np.random.default_rng(seed)
        blocks = 40 // block_tokens
        shapes = {
            "full.0": (blocks, 2, block_tokens, 2, 4),
            "full.1": (blocks, 2, block_tokens, 2, 4),
            "window.0": (blocks, 2, block_tokens, 2, 4),
            "state.0": (5, 3, 7),
        }
        self.memory = {layer: rng.integers(0, 1 << 16, shape).astype("uint16") for layer, shape in shapes.items()}
        paged: dict[str, Any] = {"axes": "block kv token head dim", "block_tokens": block_tokens}
        cache = kvlink.KVCache.join(
            kvlink.KVCache.from_tensors({layer: self.memory[layer] for layer in LAYERS[:2]}, group="full", **paged),
            kvlink.KVCache.from_tensors({LAYERS[2]: self.memory[LAYERS[2]]}, group="window", window=WINDOW, **paged),
            kvlink.KVCache.from_tensors({LAYERS[3]: self.memory[LAYERS[3]]}, group="state", axes="slot head dim"),
        )
        self.block_tokens = block_tokens
        self.node = kvlink.Node(
            cache, name=name, copy_threads=1, limits=kvlink.Limits(push_at_once_tokens=0), integrity="crc32c"
        )

    def tables(self, *, tokens: int = TOKENS) -> dict[str, list[int]]:
        """Blocks of a request, those in front of the window left out."""
        count = -(-tokens // self.block_tokens)
        first = (TOKENS - WINDOW) // self.block_tokens
        full = list(range(count))[::-1]
        return {"full": full, "window": [-1 if i < first else i for i in range(count)], "state": [3, 1]}


@pytest.fixture
def sides() -> Iterator[list[Side]]:
    made = [
        Side("prefill", seed=1, block_tokens=4),
        Side("pushed to", seed=2, block_tokens=5),
        Side("pulling", seed=2, block_tokens=5),
    ]
    yield made
    for side in made:
        side.node.close()


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0)], ids=["layer by layer", "the other way round"])
@pytest.mark.parametrize("cuts", [(0, 22), (0, 5, 17, 22), (0, 16, 21, 22)], ids=str)
def test_pieces_move_what_one_pull_moves(sides: list[Side], order: tuple[int, ...], cuts: tuple[int, ...]) -> None:
    source, target, reader = sides
    tables = source.tables()
    slot = target.node.reserve(target.tables(), num_tokens=TOKENS, ttl_s=20)
    push = source.node.push(slot.ticket, {"state": tables["state"]}, deadline_s=20)
    push.add({"full": tables["full"], "window": tables["window"]})
    for index in order:
        for first, end in zip(cuts[:-1], cuts[1:], strict=True):
            push.ready(layers=[LAYERS[index]], tokens=range(first, end))
    push.commit(b"all")
    assert slot.wait(timeout_s=10).payload == b"all"
    push.wait(timeout_s=10)

    offer = source.node.offer(tables, num_tokens=TOKENS)
    pull = reader.node.pull(offer.ticket, reader.tables()).wait(timeout_s=10)
    for layer in LAYERS:
        assert np.array_equal(target.memory[layer], reader.memory[layer]), layer
    assert slot.bytes == pull.bytes > 0
    for handle in (slot, push, offer):
        assert handle.wait_released(timeout_s=5)
    assert not any((*source.node.holds().values(), *target.node.holds().values()))
