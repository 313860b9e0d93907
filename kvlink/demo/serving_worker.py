"""A worker that serves several requests at once, a token of each in turn, as engines do: ``kvlink demo --compare``."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import kvlink
from kvlink.demo import messages as m
from kvlink.demo.channel import Channel
from kvlink.demo.model import LanguageModel
from kvlink.engines.base import FirstToken, blocks_for
from kvlink.engines.transformers import TransformersEngine

__all__ = ["ServingWorker", "run_serving"]

_HANDOFF_S = 60.0


def run_serving(name: str, language_model: LanguageModel, channel: Channel) -> None:
    """Count tokens, make the pool and the node when told to, then serve."""
    for message in channel:
        if isinstance(message, m.CountTokens):
            channel.send(m.Counted([len(language_model.encode(prompt)) for prompt in message.prompts]))
        elif isinstance(message, m.OpenPool):
            engine = TransformersEngine(
                language_model.model, num_blocks=message.num_blocks, block_tokens=message.block_tokens
            )
            engine.stop_tokens = frozenset()  # All requests last as long as the measurement does.
            with kvlink.Node(engine.cache, name=name) as node:
                channel.send(m.Ready())
                ServingWorker(engine, node, language_model, channel).serve()


@dataclass(slots=True, kw_only=True)
class _Running:
    """A request: its blocks, and what is left of its prefill, its pull, its decode."""

    request: int
    blocks: Sequence[int]
    num_tokens: int
    max_new_tokens: int
    chunks: Iterator[int] | None = None
    token: int = 0  # that the latest chunk gave
    pull: kvlink.Pull | None = None
    pulled_from_s: float = 0.0
    tokens: Iterator[int] | None = field(default=None)


class ServingWorker:
    """Decodes a token of every request, then a chunk of a prefill, then looks for messages and pulls; and again."""

    def __init__(
        self, engine: TransformersEngine, node: kvlink.Node, language_model: LanguageModel, channel: Channel
    ) -> None:
        self._engine = engine
        self._node = node
        self._language_model = language_model
        self._channel = channel
        self._arrived: queue.SimpleQueue[m.ToWorker | None] = queue.SimpleQueue()
        self._running: list[_Running] = []
        self._offers: list[tuple[kvlink.Offer, Sequence[int]]] = []

    def serve(self) -> None:
        """Do what the parent asks until it closes the pipe."""
        threading.Thread(target=self._read, name="read-parent", daemon=True).start()
        while True:
            # With nothing to compute, a message is all that can come; a pull is looked after once a millisecond.
            waits = not any(each.tokens or each.chunks for each in self._running)
            try:
                message = self._arrived.get(block=waits, timeout=0.001 if self._running else None)
            except queue.Empty:
                self._step()
                continue
            if message is None:
                return
            self._take(message)

    def _read(self) -> None:
        for message in self._channel:
            self._arrived.put(message)
        self._arrived.put(None)

    def _take(self, message: m.ToWorker) -> None:
        match message:
            case m.Join():
                self._join(message)
            case m.HandOver():
                self._hand_over(message)
            case m.Adopt():
                self._adopt(message)
            case m.Halt():
                self._halt()
            case _:
                raise AssertionError(message)

    def _join(self, message: m.Join) -> None:
        tokens = self._language_model.encode(message.prompt)
        blocks = self._engine.admit(num_tokens=len(tokens), max_new_tokens=message.max_new_tokens)
        chunks = self._engine.prefill_chunks(tokens, blocks=blocks, chunk_tokens=message.chunk_tokens or len(tokens))
        self._running.append(
            _Running(
                request=message.request,
                blocks=blocks,
                num_tokens=len(tokens),
                max_new_tokens=message.max_new_tokens,
                chunks=chunks,
            )
        )

    def _hand_over(self, message: m.HandOver) -> None:
        prefilled = self._engine.prefill(self._language_model.encode(message.prompt))
        offer = self._node.offer(
            list(prefilled.blocks),
            num_tokens=prefilled.num_tokens,
            ttl_s=_HANDOFF_S,
            payload=FirstToken(prefilled.first_token).pack(),
        )
        self._offers.append((offer, prefilled.blocks))
        self._channel.send(m.TicketMade(message.request, ticket=offer.ticket))

    def _adopt(self, message: m.Adopt) -> None:
        num_tokens = int(message.ticket["num_tokens"])
        blocks = self._engine.admit(num_tokens=num_tokens, max_new_tokens=message.max_new_tokens)
        count = blocks_for(num_tokens, block_tokens=self._engine.pool.block_tokens)
        now_s = time.monotonic()
        pull = self._node.pull(
            message.ticket, list(blocks[:count]), deadline_s=_HANDOFF_S, require=message.lane or None
        )
        self._running.append(
            _Running(
                request=message.request,
                blocks=blocks,
                num_tokens=num_tokens,
                max_new_tokens=message.max_new_tokens,
                pull=pull,
                pulled_from_s=now_s,
            )
        )

    def _step(self) -> None:
        """Take one token of each request that decodes, and one step of each that does not yet."""
        for each in list(self._running):
            if each.tokens is not None:
                self._decode(each)
        for each in list(self._running):
            if each.tokens is None:
                self._begin(each)

    def _decode(self, each: _Running) -> None:
        token = next(each.tokens, None) if each.tokens else None
        if token is None:
            self._end(each)
        else:
            self._channel.send(m.Said(each.request, token=token, at_s=time.monotonic()))

    def _begin(self, each: _Running) -> None:
        """Go on with a prefill or a pull; after it the first token is there, and takes no step of its own."""
        if each.chunks is not None:
            if (token := next(each.chunks, None)) is not None:
                each.token = token
                return
            each.chunks = None
            self._say_first(each, lane="", pull_s=0.0)
        elif each.pull is not None and each.pull.poll():
            each.token = FirstToken.unpack(each.pull.payload).token
            self._say_first(each, lane=each.pull.lane, pull_s=time.monotonic() - each.pulled_from_s)

    def _say_first(self, each: _Running, *, lane: str, pull_s: float) -> None:
        each.tokens = self._engine.decode(
            each.blocks, num_tokens=each.num_tokens, first_token=each.token, max_new_tokens=each.max_new_tokens
        )
        token = next(each.tokens)
        self._channel.send(m.Said(each.request, token=token, at_s=time.monotonic(), lane=lane, pull_s=pull_s))

    def _end(self, each: _Running) -> None:
        if each.pull is not None:
            each.pull.cancel()
            each.pull.wait_released(timeout_s=_HANDOFF_S)
        self._engine.release(each.blocks)
        self._running.remove(each)

    def _halt(self) -> None:
        for each in list(self._running):
            self._end(each)
        for offer, blocks in self._offers:
            offer.cancel()
            offer.wait_released(timeout_s=_HANDOFF_S)
            self._engine.release(blocks)
        self._offers.clear()
        self._channel.send(m.Halted())
