"""A worker that reserves and decodes, or prefills and pushes: for ``kvlink demo --push``."""

from __future__ import annotations

import time

import kvlink
from kvlink.demo import messages as m
from kvlink.demo.channel import Channel
from kvlink.demo.model import LanguageModel
from kvlink.engines.base import FirstToken, blocks_for
from kvlink.engines.transformers import TransformersEngine

__all__ = ["PushingWorker", "run_pushing"]

_PUSH_S = 120.0


def run_pushing(name: str, language_model: LanguageModel, channel: Channel) -> None:
    """Count tokens, make the pool and the node when told to, then push or be pushed to."""
    for message in channel:
        if isinstance(message, m.CountTokens):
            channel.send(m.Counted([len(language_model.encode(prompt)) for prompt in message.prompts]))
        elif isinstance(message, m.OpenPool):
            engine = TransformersEngine(
                language_model.model,
                num_blocks=message.num_blocks,
                block_tokens=message.block_tokens,
                shuffle_seed=len(name),
            )
            with kvlink.Node(engine.cache, name=name) as node:
                channel.send(m.Ready())
                PushingWorker(engine, node, language_model, channel).serve()


class PushingWorker:
    """Serves one request at a time."""

    def __init__(
        self, engine: TransformersEngine, node: kvlink.Node, language_model: LanguageModel, channel: Channel
    ) -> None:
        self._engine = engine
        self._node = node
        self._language_model = language_model
        self._channel = channel

    def serve(self) -> None:
        """Do what the parent asks until it closes the pipe."""
        for message in self._channel:
            if isinstance(message, m.ReserveRoom):
                self._reserve(message)
            elif isinstance(message, m.PushPrompt):
                self._push(message)

    def _reserve(self, message: m.ReserveRoom) -> None:
        blocks = self._engine.admit(num_tokens=message.num_tokens, max_new_tokens=message.max_new_tokens)
        count = blocks_for(message.num_tokens, block_tokens=self._engine.pool.block_tokens)
        slot = self._node.reserve(
            list(blocks[:count]), num_tokens=message.num_tokens, ttl_s=_PUSH_S, require=message.lane or None
        )
        self._channel.send(m.Reserved(message.request, ticket=slot.ticket))
        slot.wait(timeout_s=_PUSH_S)
        arrived_at_s = time.monotonic()
        tokens = self._engine.decode(
            blocks,
            num_tokens=message.num_tokens,
            first_token=FirstToken.unpack(slot.payload).token,
            max_new_tokens=message.max_new_tokens,
        )
        self._channel.send(
            m.Arrived(
                message.request,
                arrived_at_s=arrived_at_s,
                lane=slot.lane,
                kv_bytes=slot.bytes,
                tokens=list(tokens),
            )
        )
        slot.wait_released(timeout_s=_PUSH_S)
        self._engine.release(blocks)

    def _push(self, message: m.PushPrompt) -> None:
        tokens = self._language_model.encode(message.prompt)
        blocks = self._engine.admit(num_tokens=len(tokens), max_new_tokens=1)
        push = self._node.push(message.ticket, list(blocks), deadline_s=_PUSH_S)

        def layer_is_ready(layer: int, stored: range) -> None:
            push.ready(layers=[f"layers.{layer}"], tokens=stored)

        began_s = time.monotonic()
        *_, first_token = self._engine.prefill_chunks(
            tokens,
            blocks=blocks,
            chunk_tokens=len(tokens),
            on_layer=layer_is_ready if message.by_layer else None,
        )
        committed_at_s = time.monotonic()
        push.commit(FirstToken(first_token).pack())
        push.wait(timeout_s=_PUSH_S)
        push.wait_released(timeout_s=_PUSH_S)
        self._engine.release(blocks)
        self._channel.send(
            m.Committed(message.request, prefill_s=committed_at_s - began_s, committed_at_s=committed_at_s)
        )
