"""An engine adapter, whole: what stands between an engine's blocks and kvlink.

The engine here is a toy that fills its blocks with random numbers. Everything else is what an adapter
has to do, and the conformance kit at the end makes sure that it does.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import kvlink
from kvlink.testing.conformance import CASES, Kit

BLOCK_TOKENS, HEADS, DIM, LAYERS = 4, 2, 8, 2


@dataclass(eq=False)
class Request:
    """A request of the engine: its blocks, and its handoff."""

    blocks: tuple[int, ...]
    num_tokens: int
    handle: Any = None
    is_finished: bool = field(default=False)


class ToyAdapter:
    """One worker: prefill and decode both."""

    def __init__(self, name: str, num_blocks: int = 48) -> None:
        shape = (LAYERS, 2, num_blocks, BLOCK_TOKENS, HEADS, DIM)
        self.tensor = np.asarray(kvlink.empty(shape, "float32"))
        # 1. Describe the cache: what each axis is, by the names that all ranks and workers use for the layers.
        cache = kvlink.KVCache.from_tensors(
            {f"layers.{index}": layer for index, layer in enumerate(self.tensor)},
            axes="kv block token head dim",
            block_tokens=BLOCK_TOKENS,
        )
        self.node = kvlink.Node(cache, name=name)
        self.block_tokens = BLOCK_TOKENS
        # 2. An allocator that takes blocks back only once their handoffs have released them. An engine with its own
        #    asks `handle.released`, or waits for the event "released" of `node.completions`, before it does.
        self.pool = kvlink.BlockPool(num_blocks)

    def num_free(self) -> int:
        """Count what could be allocated."""
        return self.pool.num_free

    def send(self, *, num_tokens: int, seed: int, ttl_s: float) -> Request | None:
        """Prefill, and offer what came of it."""
        request = self._admit(num_tokens)
        if request is None:
            return None
        for _ in self._prefill(request, seed):
            pass
        # 3. Offer once the bytes stand there: after the kernel that writes them, not after its launch.
        return self._started(request, lambda: self.node.offer(request.blocks, num_tokens=num_tokens, ttl_s=ttl_s))

    def ticket(self, request: Request) -> dict[str, Any]:
        """Return what a router carries."""
        return dict(request.handle.ticket)

    def receive(self, ticket: dict[str, Any], *, deadline_s: float) -> Request | None:
        """Set blocks aside, and have them filled."""
        request = self._admit(int(ticket["num_tokens"]))
        if request is None:
            return None
        return self._started(request, lambda: self.node.pull(ticket, request.blocks, deadline_s=deadline_s))

    def reserve(self, *, num_tokens: int, ttl_s: float) -> Request | None:
        """Set blocks aside, for another worker to push into."""
        request = self._admit(num_tokens)
        if request is None:
            return None
        return self._started(request, lambda: self.node.reserve(request.blocks, num_tokens=num_tokens, ttl_s=ttl_s))

    def push(self, ticket: dict[str, Any], *, seed: int, deadline_s: float) -> Request | None:
        """Prefill, and push each layer as soon as it stands there."""
        request = self._admit(int(ticket["num_tokens"]))
        if request is None:
            return None
        self._started(request, lambda: self.node.push(ticket, request.blocks, deadline_s=deadline_s))
        with contextlib.suppress(kvlink.KvlinkError):  # it has failed meanwhile, and `poll` says why
            for layer in self._prefill(request, seed):
                request.handle.ready(layers=[f"layers.{layer}"])
            request.handle.commit()
        return request

    def poll(self, request: Request) -> bool:
        """Look whether it is here; never wait."""
        # 5. Decode only after success. After an error, error.valid_prefix_tokens may be used and the rest recomputed.
        done: bool = request.handle.poll()
        return done

    def content(self, request: Request) -> bytes:
        """Return the KV of its tokens, wherever they lie."""
        tokens = self.tensor[:, :, list(request.blocks)].reshape(LAYERS, 2, -1, HEADS, DIM)
        return tokens[:, :, : request.num_tokens].tobytes()

    def abort(self, request: Request) -> None:
        """Give it up."""
        request.handle.cancel()  # harmless in every state
        self.finish(request)

    def finish(self, request: Request) -> None:
        """Let go of its blocks, once."""
        if not request.is_finished:
            request.is_finished = True
            self.pool.free(request.blocks)  # 6. The pool waits for `released`; nothing else may be sooner.

    def close(self) -> None:
        """End."""
        self.node.close()

    def _started(self, request: Request, start: Callable[[], Any]) -> Request:
        try:
            request.handle = self.pool.give(request.blocks, start())
        except kvlink.KvlinkError:
            self.pool.free(request.blocks)  # 4. Nothing was started, so nothing holds them.
            raise
        return request

    def _prefill(self, request: Request, seed: int) -> Iterator[int]:
        """Stand in for the engine's: compute one layer after another."""
        for layer in range(LAYERS):
            for number, block in enumerate(request.blocks):
                rng = np.random.default_rng((seed, layer, number))
                self.tensor[layer, :, block] = rng.standard_normal((2, BLOCK_TOKENS, HEADS, DIM))
            yield layer

    def _admit(self, num_tokens: int) -> Request | None:
        try:
            return Request(self.pool.allocate(-(-num_tokens // BLOCK_TOKENS)), num_tokens)
        except kvlink.errors.OutOfMemory:
            return None


def main() -> None:
    """Drive the adapter through every class of faults."""
    for case in CASES:
        case(Kit(make=ToyAdapter))
        print(f"{case.__name__}: as it should be")


if __name__ == "__main__":
    main()
