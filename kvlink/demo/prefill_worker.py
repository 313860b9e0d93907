"""The worker that sees the prompts: it computes their KV and hands it to decode workers."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

import kvlink
from kvlink.demo import messages as m
from kvlink.demo.channel import Channel
from kvlink.demo.model import LanguageModel
from kvlink.engines.base import FirstToken, Prefilled, PrefillEngine
from kvlink.errors import DeadlineExceeded

__all__ = ["PrefillWorker", "run_prefill"]

# Longer than any answer takes: a ticket waits while its decode worker is busy with the one before.
_LEASE_S = 600.0


def run_prefill(name: str, language_model: LanguageModel, channel: Channel) -> None:
    """Count tokens, make the pool and the node when told to, then prefill and hand over."""
    for message in channel:
        if isinstance(message, m.CountTokens):
            channel.send(m.Counted([len(language_model.encode(prompt)) for prompt in message.prompts]))
        elif isinstance(message, m.OpenPool):
            from kvlink.engines.transformers import TransformersEngine

            engine = TransformersEngine(
                language_model.model, num_blocks=message.num_blocks, block_tokens=message.block_tokens
            )
            with kvlink.Node(engine.cache, name=name) as node:
                worker = PrefillWorker(
                    engine, node, decode_blocks=message.decode_blocks, encode=language_model.encode, channel=channel
                )
                channel.send(m.Ready())
                worker.serve()


class PrefillWorker:
    """Serves one request at a time: prefill, then each handoff, then the blocks are free again.

    The parent carries the tickets; it says too when an answer is complete, which gives the room
    on the decode worker back to the scheduler.
    """

    def __init__(
        self,
        engine: PrefillEngine,
        node: kvlink.Node,
        *,
        decode_blocks: dict[str, int],
        encode: Callable[[str], Sequence[int]],
        channel: Channel,
    ) -> None:
        self._engine = engine
        self._node = node
        self._encode = encode
        self._channel = channel
        self._scheduler = kvlink.Scheduler(
            node,
            workers=[
                kvlink.DecodeWorker(name=name, free_blocks=blocks, hand_off=self._sender_to(name))
                for name, blocks in decode_blocks.items()
            ],
        )
        self._requests: queue.SimpleQueue[m.Prefill | None] = queue.SimpleQueue()
        self._placements: dict[m.HandoffName, kvlink.Placement] = {}
        self._answered: dict[m.HandoffName, threading.Event] = {}
        self._under_way = m.HandoffName(request=0, round=0)
        self._started_s = 0.0

    def serve(self) -> None:
        """Do what the parent asks until it closes the pipe."""
        threading.Thread(target=self._read, name="read-parent", daemon=True).start()
        while (message := self._requests.get()) is not None:
            self._serve_request(message)

    def _read(self) -> None:
        """Take messages while the other thread computes. An answer that is complete makes room at once."""
        for message in self._channel:
            if isinstance(message, m.Prefill):
                self._requests.put(message)
            elif isinstance(message, m.Answered):
                self._scheduler.release(self._placements.pop(message.handoff))
                self._answered[message.handoff].set()
        # Without a parent nobody carries a ticket, or says that an answer is complete: end the wait for either.
        self._node.close()
        for answered in list(self._answered.values()):
            answered.set()
        self._requests.put(None)

    def _serve_request(self, message: m.Prefill) -> None:
        token_ids = self._encode(message.prompt)
        start = time.monotonic()
        prefilled = self._engine.prefill(token_ids)
        prefill_s = time.monotonic() - start
        self._channel.send(m.Prefilled(message.request, prompt_tokens=prefilled.num_tokens, prefill_s=prefill_s))
        for round_index in range(message.handoffs):
            handoff = m.HandoffName(message.request, round_index)
            self._hand_off(handoff, prefilled, message.max_new_tokens)
            # The next handoff of the same request is not to wait behind this one's answer. The next
            # request may: its prefill runs meanwhile.
            if round_index + 1 < message.handoffs and not self._answered[handoff].wait(_LEASE_S):
                raise DeadlineExceeded(f"answer request {message.request}: not done in {_LEASE_S:g} s")
        self._engine.release(prefilled.blocks)
        self._channel.send(m.Released(message.request))

    def _hand_off(self, handoff: m.HandoffName, prefilled: Prefilled, max_new_tokens: int) -> None:
        """Place the request on a decode worker, and hand it over: on return that worker has read everything."""
        placement = self._scheduler.place_blocking(
            num_tokens=prefilled.num_tokens + max_new_tokens, deadline_s=_LEASE_S
        )
        self._placements[handoff] = placement
        self._answered[handoff] = threading.Event()
        self._under_way = handoff
        self._started_s = time.monotonic()
        self._scheduler.hand_off_blocking(
            placement,
            blocks=list(prefilled.blocks),
            num_tokens=prefilled.num_tokens,
            ttl_s=_LEASE_S,
            label=f"request-{handoff.request}",
            payload=FirstToken(prefilled.first_token).pack(),
        )

    def _sender_to(self, decode_worker: str) -> Callable[[dict[str, object]], None]:
        def send_ticket(ticket: dict[str, object]) -> None:
            now_s = time.monotonic()
            self._channel.send(
                m.Offered(
                    self._under_way,
                    decode_worker=decode_worker,
                    ticket=ticket,
                    offer_s=now_s - self._started_s,
                    offered_at_s=now_s,
                )
            )

        return send_ticket
