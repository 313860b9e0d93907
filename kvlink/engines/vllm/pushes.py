"""Pushes of one worker, layer by layer while the prompt is computed: they begin when decode's reservation has come.

A step of vLLM is `begin`, `layer_done` after each attention layer, and `end`. Where the layers' hooks are
skipped, as in full CUDA graphs, `end` says of all layers what the hooks have not said.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import kvlink
from kvlink.commands import Add, Cancel, Command, Commit, Push, Ready
from kvlink.engines.vllm.config import ConnectorConfig
from kvlink.engines.vllm.layouts import DescribedCache
from kvlink.engines.vllm.ledger import Ledger
from kvlink.engines.vllm.messages import Expect, Progress, StepOrders, Tables
from kvlink.engines.vllm.tables import node_tables, whole_blocks
from kvlink.errors import KvlinkError

__all__ = ["Pushes", "label_of"]

log = logging.getLogger("vllm.kvlink")


@dataclass(slots=True)
class _Outgoing:
    """One prompt that is to be pushed.

    `told_end` counts the tokens that were said to be ready in all layers; of those up to `step_end` some layers were.
    """

    order: Expect
    total: int
    expectation: Any
    tables: Tables = ()
    computed: int = 0
    told_end: int = 0
    step_end: int = 0
    told_layers: set[str] = field(default_factory=set)
    blocks_given: int = 0
    started: bool = False
    committed: bool = False
    over: bool = False
    complete: bool | None = None  # none: prefill goes on
    report: bool = True
    until: float = 0.0


class Pushes:
    """What this worker pushes. Called by the worker's one thread; nothing waits."""

    def __init__(
        self, config: ConnectorConfig, node: kvlink.Node, described: DescribedCache, ledger: Ledger, *, rank: int
    ) -> None:
        self._config = config
        self._node = node
        self._described = described
        self._ledger = ledger
        self._rank = rank
        self._sizes = [group.block_tokens for group in described.groups]
        self._outgoing: dict[str, _Outgoing] = {}
        self._layers = tuple(dict.fromkeys(part.layer for part in described.cache.layout.parts))

    def __len__(self) -> int:
        """Return how many prompts wait or move."""
        return len(self._outgoing)

    def begin(self, orders: StepOrders) -> None:
        """Take the orders of a step before its layers are computed."""
        for expect in orders.expects:
            self._expect(expect)
        for progress in orders.progress:
            self._progress(progress)
        for finish in orders.finishes:
            if (push := self._outgoing.get(finish.id)) is not None:
                push.complete, push.report = finish.complete, finish.report
                # Decode may be about to reserve, and should hear what became of the prompt.
                push.until = time.monotonic() + (self._config.ttl_s if push.complete else self._config.retry_s)
        for push in self._outgoing.values():
            self._go_on(push)

    def layer_done(self, layer: str) -> None:
        """Say that a layer has computed the tokens of this step."""
        commands: list[Command] = []
        for push in self._outgoing.values():
            if push.started and not push.over and push.told_end < push.step_end and layer not in push.told_layers:
                push.told_layers.add(layer)
                commands.append(self._ready(push, [layer]))
        self._submit(commands)

    def end(self) -> None:
        """Say that the tokens of this step are computed, in the layers of which nobody has said it."""
        commands: list[Command] = []
        for push in self._outgoing.values():
            if push.started and not push.over and push.told_end < push.step_end:
                rest = [layer for layer in self._layers if layer not in push.told_layers]
                if rest:
                    commands.append(self._ready(push, rest))
            if push.started:
                push.told_end = max(push.told_end, push.step_end)
            push.computed = max(push.computed, push.step_end)
            push.told_layers.clear()
        self._submit(commands)

    def take_sent(self, over: Iterable[str]) -> set[str]:
        """Return the requests whose blocks are free, given the ids of pushes that are over."""
        for push_id in over:
            if (push := self._outgoing.get(push_id)) is not None:
                push.over = True
        now = time.monotonic()
        sent = set()
        for push_id, push in list(self._outgoing.items()):
            nobody_came = not push.started and (push.expectation is None or now >= push.until)
            if push.complete is not None and (push.over or nobody_came):
                if nobody_came and push.complete:
                    log.warning("kvlink: nobody has reserved blocks for request %s", push.order.request_id)
                del self._outgoing[push_id]
                if push.report:
                    sent.add(push.order.request_id)
        return sent

    def _expect(self, order: Expect) -> None:
        total = order.num_tokens
        if self._described.whole_blocks:
            total = whole_blocks(total, self._sizes)
        try:
            waits = self._node.expect(f"{order.key}/{self._rank}", deadline_s=min(86400.0, self._longest_s()))
        except KvlinkError as error:
            log.warning("kvlink: push of request %s cannot be: %s", order.request_id, error)
            waits = None
        self._outgoing[order.id] = _Outgoing(order=order, total=total, expectation=waits)

    def _longest_s(self) -> float:
        return self._config.deadline_s + self._config.ttl_s

    def _progress(self, order: Progress) -> None:
        push = self._outgoing.get(order.id)
        if push is None:
            return
        push.tables = order.tables
        # What was here before the request came, by the prefix cache, is computed as well.
        push.computed = max(push.computed, self._aligned(push, order.first_token))
        push.step_end = self._aligned(push, order.end_token)

    def _aligned(self, push: _Outgoing, tokens: int) -> int:
        """Return up to where tokens can move that are computed: whole blocks, where those cannot be told apart."""
        if tokens >= push.order.num_tokens:
            return push.total
        if not self._described.whole_blocks:
            return tokens
        largest = max(self._sizes)
        return tokens // largest * largest

    def _go_on(self, push: _Outgoing) -> None:
        """Begin a push whose reservation has come, and tell it what there is."""
        if not push.started and push.expectation is not None:
            self._look(push)
        if not push.started or push.over:
            return
        commands: list[Command] = []
        if push.complete is False:
            commands.append(Cancel(push.order.id))
        else:
            commands += self._more(push)
            if push.complete and not push.committed:
                push.committed = True
                commands.append(Commit(push=push.order.id))
        self._submit(commands)

    def _look(self, push: _Outgoing) -> None:
        try:
            if not push.expectation.poll():
                return
        except KvlinkError as error:
            log.warning("kvlink: push of request %s cannot be: %s", push.order.request_id, error)
            push.expectation = None
            return
        ticket, push.expectation = push.expectation.ticket, None
        push.started = True
        self._ledger.expect(push.order.id, push.order.request_id, sends=True, quiet=True)
        commands: list[Command] = [
            Push(
                id=push.order.id,
                ticket=ticket,
                blocks={},
                deadline_s=self._config.deadline_s,
                label=label_of(push.order.request_id),
            )
        ]
        if ticket["num_tokens"] != push.total:
            log.warning(
                "kvlink: push of request %s: %d tokens are reserved and %d are computed: are it two prompts?",
                push.order.request_id,
                ticket["num_tokens"],
                push.total,
            )
            commands.append(Cancel(push.order.id))  # so that the other side hears of it
        self._submit(commands)

    def _more(self, push: _Outgoing) -> list[Command]:
        """Return what tells a push of blocks and tokens that it does not know."""
        commands: list[Command] = []
        reach = max(push.computed, push.step_end)
        if push.tables:
            tables = node_tables(push.tables, self._described.groups, num_tokens=reach)
            if reach > push.blocks_given:
                before = node_tables(push.tables, self._described.groups, num_tokens=push.blocks_given)
                fresh = {name: table[len(before[name]) :] for name, table in tables.items()}
                if any(fresh.values()):
                    commands.append(Add(push=push.order.id, blocks=fresh))
                push.blocks_given = reach
        if push.told_end < push.computed and push.complete is None:
            commands.append(Ready(push=push.order.id, first_token=push.told_end, end_token=push.computed))
            push.told_end = push.computed
        return commands

    def _ready(self, push: _Outgoing, layers: list[str]) -> Ready:
        return Ready(push=push.order.id, layers=layers, first_token=push.told_end, end_token=push.step_end)

    def _submit(self, commands: list[Command]) -> None:
        if not commands:
            return
        try:
            self._node.submit(commands)
        except KvlinkError as error:
            log.warning("kvlink: pushes of this step cannot go on: %s", error)


def label_of(request_id: str) -> str:
    """Return what a node calls the handoffs of a request, whose id comes from its client."""
    return "".join(letter if letter.isprintable() else "?" for letter in request_id[:200])
