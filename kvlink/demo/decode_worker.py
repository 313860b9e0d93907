"""The worker that sees tickets only: it pulls the KV of a request and decodes from there."""

from __future__ import annotations

import time

import kvlink
from kvlink.demo import messages as m
from kvlink.demo.channel import Channel
from kvlink.demo.model import LanguageModel, TextStream
from kvlink.engines.base import FirstToken, blocks_for
from kvlink.engines.transformers import PagedPool, TransformersEngine
from kvlink.errors import LaneUnavailable

__all__ = ["DecodeWorker", "run_decode"]

_PULL_S = 30.0


def run_decode(name: str, language_model: LanguageModel, channel: Channel) -> None:
    """Make the pool and the node when told to, then pull and decode."""
    for message in channel:
        if isinstance(message, m.OpenPool):
            # Blocks are taken in another order than on the prefill side: only the block tables pair them.
            engine = TransformersEngine(
                language_model.model,
                num_blocks=message.num_blocks,
                block_tokens=message.block_tokens,
                shuffle_seed=len(name),
            )
            with kvlink.Node(engine.cache, name=name) as node:
                channel.send(m.Ready())
                DecodeWorker(engine, node, language_model, channel=channel).serve()


class DecodeWorker:
    """Serves one request at a time."""

    def __init__(
        self,
        engine: TransformersEngine,
        node: kvlink.Node,
        language_model: LanguageModel,
        *,
        channel: Channel,
    ) -> None:
        self._engine = engine
        self._node = node
        self._language_model = language_model
        self._channel = channel

    def serve(self) -> None:
        """Do what the parent asks until it closes the pipe."""
        for message in self._channel:
            if isinstance(message, m.Decode):
                self._serve_request(message)

    def _serve_request(self, message: m.Decode) -> None:
        num_tokens = int(message.ticket["num_tokens"])
        blocks = self._engine.admit(num_tokens=num_tokens, max_new_tokens=message.max_new_tokens)
        start_s = time.monotonic()
        pull = self._pull(message, blocks[: blocks_for(num_tokens, block_tokens=self._engine.pool.block_tokens)])
        pull_s = time.monotonic() - start_s
        first_token = FirstToken.unpack(pull.payload).token
        corrupted = None
        if message.corrupt:
            corrupted = blocks[0]
            corrupt_block(self._engine.pool, corrupted)
        self._channel.send(
            m.Pulled(
                message.handoff,
                lane=pull.lane,
                kv_bytes=pull.bytes,
                pulled_at_s=start_s,
                pull_s=pull_s,
                phases_s=dict(pull.phases_s),
                corrupted_block=corrupted,
            )
        )
        self._decode(message, blocks, num_tokens=num_tokens, first_token=first_token)
        pull.wait_released(timeout_s=_PULL_S)
        self._engine.release(blocks)

    def _pull(self, message: m.Decode, blocks: tuple[int, ...]) -> kvlink.Pull:
        """Pull on the first lane of `message` that can be used, or on the one the node picks."""
        lanes: list[str | None] = [*message.lanes] or [None]
        *first_choices, last_choice = lanes
        for lane in first_choices:
            try:
                return self._pull_on(lane, message, blocks)
            except LaneUnavailable:
                continue
        return self._pull_on(last_choice, message, blocks)

    def _pull_on(self, lane: str | None, message: m.Decode, blocks: tuple[int, ...]) -> kvlink.Pull:
        pull = self._node.pull(
            message.ticket,
            blocks=list(blocks),
            deadline_s=_PULL_S,
            require=lane,
            label=f"request-{message.handoff.request}",
        )
        pull.wait(timeout_s=_PULL_S)
        return pull

    def _decode(self, message: m.Decode, blocks: tuple[int, ...], *, num_tokens: int, first_token: int) -> None:
        self._engine.forward_tokens.clear()
        stream = TextStream(self._language_model)
        tokens: list[int] = []
        times = [time.perf_counter()]
        for token in self._engine.decode(
            blocks, num_tokens=num_tokens, first_token=first_token, max_new_tokens=message.max_new_tokens
        ):
            tokens.append(token)
            times.append(time.perf_counter())
            self._channel.send(m.Token(message.handoff, token=token, text=stream.add(token)))
        self._channel.send(
            m.Decoded(
                message.handoff,
                tokens=tokens,
                text=self._language_model.text_of(tokens),
                forward_tokens=list(self._engine.forward_tokens),
                # times[1] belongs to the first token, which came with the KV and took no forward.
                first_step_s=times[2] - times[1] if len(times) > 2 else 0.0,
                decode_s=times[-1] - times[1],
            )
        )


def corrupt_block(pool: PagedPool, block: int) -> None:
    """Flip the sign of every key and value in `block`, as a broken transfer might.

    The block with the start of the prompt is the one to take: every later token attends to it
    strongly, so that the text is sure to change.
    """
    pool.tensor[:, :, block].neg_()
