"""What runs inside a worker process that is one rank of an engine: a node over its part of a cache of tagged elements.

Every element has a tag that follows from its global coordinate (layer, component, token, head, dim) and a seed, so
that what a target must hold does not depend on how any source lays it out.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import kvlink


@dataclass(frozen=True, kw_only=True)
class Rank:
    """The part of a model's cache that one rank has, and how it lies there. No heads: latents, the same everywhere."""

    layers: tuple[str, ...] = ("layers.0", "layers.1")
    heads: tuple[int, int] | None = (0, 8)
    total_kv_heads: int = 8
    head_dim: int = 16
    block_tokens: int = 4
    num_blocks: int = 12
    axes: str = "kv block token head dim"
    memory: str = "pool"

    @property
    def shape(self) -> tuple[int, ...]:
        """Of each layer's tensor."""
        first, end = self.heads or (0, 1)
        sizes = {
            "kv": 2,
            "block": self.num_blocks,
            "token": self.block_tokens,
            "head": end - first,
            "dim": self.head_dim,
        }
        return tuple(sizes[axis] for axis in self.axes.split())


class RankWorker:
    """One rank. Every method answers within the time it is given."""

    def __init__(self) -> None:
        self._node: Any = None
        self._handles: list[Any] = []

    def open(self, rank: Rank, **options: Any) -> dict[str, Any]:
        """Start a node over fresh memory; returns its descriptor."""
        self.shut()
        self._rank = rank
        layer_elements = int(np.prod(rank.shape))
        size = layer_elements * len(rank.layers)
        if rank.memory == "pool":
            self._owner: Any = kvlink.empty((size * 2,), "uint8")
            self._flat = np.frombuffer(self._owner, dtype=np.uint16)
        else:
            self._flat = np.empty(size, dtype=np.uint16)
        self._flat[:] = 0xEEEE
        self._expected = self._flat.copy()
        tensors = dict(zip(rank.layers, self._flat.reshape(len(rank.layers), *rank.shape), strict=True))
        heads = {} if rank.heads is None else {"heads": range(*rank.heads), "total_kv_heads": rank.total_kv_heads}
        cache = kvlink.KVCache.from_tensors(tensors, axes=rank.axes, block_tokens=rank.block_tokens, **heads)
        self._node = kvlink.Node(cache, copy_threads=1, **options)
        descriptor: dict[str, Any] = self._node.descriptor
        return descriptor

    def shut(self) -> None:
        """Close the node, if there is one."""
        if self._node is not None:
            self._node.close()
        self._node = self._flat = self._owner = None
        self._handles = []

    def fill(self, blocks: Sequence[int], num_tokens: int, *, seed: int) -> None:
        """Write the tags of the tokens, as a prefill does."""
        self._write(self._flat, blocks, range(num_tokens), seed=seed)

    def offer(self, blocks: Sequence[int], **options: Any) -> int:
        """Offer blocks; returns the handle's number."""
        return self._keep(self._node.offer(list(blocks), **options))

    def pull(self, ticket: Any, blocks: Sequence[int], **options: Any) -> int:
        """Start a pull and return its handle's number."""
        return self._keep(self._node.pull(ticket, list(blocks), **options))

    def reserve(self, blocks: Sequence[int], **options: Any) -> tuple[int, dict[str, Any]]:
        """Reserve blocks; returns the handle's number and the ticket."""
        slot = self._node.reserve(list(blocks), **options)
        return self._keep(slot), slot.ticket

    def push(self, ticket: Any, blocks: Sequence[int], *, payload: bytes, **options: Any) -> int:
        """Push, the first layer before the others; returns the handle's number."""
        push = self._node.push(ticket, list(blocks[:1]), **options)
        handle = self._keep(push)
        push.ready(layers=[self._rank.layers[0]], tokens=range(min(self._rank.block_tokens, push.num_tokens)))
        push.add(list(blocks[1:]))
        push.commit(payload)
        return handle

    def wait(self, handle: int, *, timeout_s: float = 20.0) -> tuple[str, int, bytes]:
        """Wait for outcome and release; returns lane, bytes and payload, or raises the handoff's error."""
        kept = self._handles[handle].wait(timeout_s=timeout_s)
        assert kept.wait_released(timeout_s=timeout_s)
        return kept.lane, kept.bytes, getattr(kept, "payload", b"")

    def wait_until_released(self, handle: int, *, timeout_s: float = 20.0) -> str:
        """Wait for the release, whatever the outcome; returns the error's class, or nothing."""
        kept = self._handles[handle]
        assert kept.wait_released(timeout_s=timeout_s), kept
        return "" if kept.error is None else type(kept.error).__name__

    def failed(self, handle: int) -> tuple[Any, ...]:
        """What a handle says did not arrive."""
        failed: tuple[Any, ...] = self._handles[handle].failed
        return failed

    def state(self, handle: int) -> str:
        """How a handle stands."""
        return str(self._handles[handle].state)

    def cancel(self, handle: int) -> None:
        """Cancel a handoff."""
        self._handles[handle].cancel()

    def expect(self, blocks: Sequence[int], num_tokens: int, *, seed: int, skip_tokens: int = 0) -> None:
        """Note that these tokens must have arrived, and nothing else."""
        self._write(self._expected, blocks, range(skip_tokens, num_tokens), seed=seed)

    def wrong_elements(self) -> int:
        """How many elements of the whole memory differ from what was expected."""
        return int(np.count_nonzero(self._flat != self._expected))

    def peers(self) -> list[dict[str, Any]]:
        """The node's peers."""
        peers: list[dict[str, Any]] = self._node.peers()
        return peers

    def holds(self) -> list[int]:
        """Counts of what the node still holds."""
        return list(self._node.holds().values())

    def _keep(self, handle: Any) -> int:
        self._handles.append(handle)
        return len(self._handles) - 1

    def _write(self, flat: np.ndarray, blocks: Sequence[int], tokens: range, *, seed: int) -> None:
        for layer, component, array in self._components(flat):
            for token in tokens:
                block = blocks[token // self._rank.block_tokens]
                if block >= 0:
                    array[block, token % self._rank.block_tokens] = self._tags(layer, component, token, seed)

    def _components(self, flat: np.ndarray) -> Iterator[tuple[str, str, np.ndarray]]:
        """Views of each component of each layer, with dimensions block, token, head, dim."""
        rank = self._rank
        names = rank.axes.split()
        for layer, tensor in zip(rank.layers, flat.reshape(len(rank.layers), *rank.shape), strict=True):
            if rank.heads is None:
                yield layer, "latent", tensor.transpose([names.index(a) for a in ("block", "token", "dim")])[:, :, None]
                continue
            order = [names.index(axis) for axis in ("kv", "block", "token", "head", "dim")]
            for component, array in zip("kv", tensor.transpose(order), strict=True):
                yield layer, component, array

    def _tags(self, layer: str, component: str, token: int, seed: int) -> np.ndarray:
        first, end = self._rank.heads or (0, 1)
        index = np.arange(first * self._rank.head_dim, end * self._rank.head_dim, dtype=np.uint64)
        start = zlib.crc32(f"{seed}/{layer}/{component}/{token}".encode())
        mixed = (index + np.uint64(start)) * np.uint64(0x9E3779B97F4A7C15)  # wraps: a multiplicative hash
        return (mixed >> np.uint64(40)).astype(np.uint16).reshape(end - first, self._rank.head_dim)
