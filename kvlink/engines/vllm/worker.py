"""The half in each of vLLM's workers: one node, told what to do and asked what happened. Nothing waits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import kvlink
from kvlink.commands import Cancel, Command, Event, Offer, Pull
from kvlink.commands import Reserve as ReserveCommand
from kvlink.engines.vllm.config import ConnectorConfig, rank_address
from kvlink.engines.vllm.layouts import CacheGroup, Content, DescribedCache, RankPlace, describe
from kvlink.engines.vllm.ledger import Ended, Ledger, Report
from kvlink.engines.vllm.messages import Receive, Reserve, Send, StepOrders, Tables, WorkerFacts
from kvlink.engines.vllm.pushes import Pushes, label_of
from kvlink.engines.vllm.stats import Tally
from kvlink.engines.vllm.tables import node_tables, whole_blocks
from kvlink.errors import KvlinkError, LayoutMismatch, PeerLost, PeerUnreachable, TicketExpired

__all__ = ["WorkerHalf"]

log = logging.getLogger("vllm.kvlink")

# After these there is no source, or it holds nothing for us.
_NOBODY_TO_TELL = (PeerUnreachable, PeerLost, TicketExpired, LayoutMismatch)


class WorkerHalf:
    """One rank's node, and what vLLM must be told of it. Called by the worker's one thread.

    Attributes
    ----------
    node
        Once the caches are registered.
    """

    def __init__(self, config: ConnectorConfig, *, name: str, rank: int, world_size: int) -> None:
        self._config = config
        self._name = name
        self._rank = rank
        self._world_size = world_size
        self._ledger = Ledger()
        self._tally = Tally()
        self._receives: dict[str, Receive] = {}
        self._refused: list[Event] = []
        self._bad_blocks: set[int] = set()
        self._announced: dict[str, Any] = {}
        self._pushes: Pushes | None = None
        self._described: DescribedCache | None = None
        self._one_group = True
        self.node: kvlink.Node | None = None

    def register(
        self,
        kv_caches: Mapping[str, Any],
        groups: list[CacheGroup],
        *,
        num_blocks: int,
        place: RankPlace,
        content: Callable[[str, int], Content],
        model: str | None,
        one_group: bool,
    ) -> None:
        """Describe the tensors, and start the node over them.

        Raises
        ------
        KvlinkError
            If the cache cannot be handed over, or the node cannot start; the leaf and the message say why.
        """
        config = self._config
        described = describe(
            kv_caches, groups, num_blocks=num_blocks, place=place, content=content, model=config.model or model
        )
        self._described = described
        self._one_group = one_group
        self.node = kvlink.Node(
            described.cache,
            name=self._name,
            listen=rank_address(config.listen, self._rank) or config.listen,
            advertise=rank_address(config.advertise, self._rank),
            secret=config.read_secret(),
            limits=config.limits(),
            lanes=config.lanes,
            copy_threads=config.copy_threads,
            integrity=config.integrity,
        )
        self._pushes = Pushes(config, self.node, described, self._ledger, rank=self._rank)
        log.info("kvlink: %s listens at %s over %r", self._name, self.node.address, described.cache)

    @property
    def facts(self) -> WorkerFacts:
        """What the scheduler half must know."""
        node, described = self._started()
        return WorkerFacts(descriptor=node.descriptor, whole_blocks=described.whole_blocks)

    def begin(self, orders: StepOrders) -> None:
        """Take what a step says of pushes, before its layers are computed. Does not wait."""
        if self._pushes is not None:
            self._pushes.begin(orders)

    def layer_done(self, layer: str) -> None:
        """Push what a layer has computed in this step. Does not wait."""
        if self._pushes:
            self._pushes.layer_done(layer)

    def start(self, orders: StepOrders) -> None:
        """Start what the scheduler half has ordered, after the layers were computed. Does not wait."""
        if self._pushes:
            self._pushes.end()
        for reserve in orders.reserves:
            self._reserve(reserve)
        if not (orders.sends or orders.receives or orders.cancels):
            return
        node, _ = self._started()
        commands: list[Command] = [self._offer(send) for send in orders.sends]
        commands += [self._pull(receive) for receive in orders.receives]
        commands += [Cancel(command_id) for command_id in orders.cancels]
        try:
            node.submit(commands)
        except KvlinkError as error:  # of the batch as a whole, such as Busy: nothing of it was started
            for command in commands:
                if not isinstance(command, Cancel):
                    self._refused.append(Event(id=command.id, tag=None, kind="outcome", error=error))
                    self._refused.append(Event(id=command.id, tag=None, kind="released"))

    def poll(self) -> Report:
        """Return what has ended since the last call. Does not wait."""
        if self.node is None:
            return Report()
        refused, self._refused = self._refused, []
        self._look_at_announcements()
        report = self._ledger.take([*refused, *self.node.completions()])
        for ended in report.ended:
            self._note(ended, report)
        if self._pushes:
            report.sent |= self._pushes.take_sent(ended.id for ended in report.ended)
        return report

    def take_bad_blocks(self) -> set[int]:
        """Return the blocks, as vLLM's scheduler counts them, that did not arrive; only where there is one group."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_tally(self) -> dict[str, Any] | None:
        """Return what was counted since the last call, if anything."""
        return self._tally.take()

    def close(self) -> None:
        """End the node. Idempotent."""
        if self.node is not None:
            self.node.close()

    def _started(self) -> tuple[kvlink.Node, DescribedCache]:
        if self.node is None or self._described is None:
            raise KvlinkError(f"{self._name}: vLLM has registered no KV cache yet")
        return self.node, self._described

    def _offer(self, send: Send) -> Offer:
        _, described = self._started()
        self._ledger.expect(send.id, send.request_id, sends=True)
        blocks = node_tables(send.tables, described.groups, num_tokens=send.ticket["num_tokens"])
        return Offer(
            id=send.id,
            ticket=send.ticket,
            blocks=blocks,
            retry_s=self._config.retry_s,
            label=label_of(send.request_id),
        )

    def _pull(self, receive: Receive) -> Pull:
        _, described = self._started()
        self._ledger.expect(receive.id, receive.request_id, sends=False, quiet=receive.quiet)
        self._receives[receive.id] = receive
        return Pull(
            id=receive.id,
            ticket=receive.ticket,
            blocks=node_tables(_or_holes(receive.tables, described), described.groups, num_tokens=receive.num_tokens),
            skip_tokens=receive.skip_tokens,
            deadline_s=self._config.deadline_s,
            ranks=self._world_size,
            label=label_of(receive.request_id),
        )

    def _reserve(self, reserve: Reserve) -> None:
        """Hold blocks for a push, and tell the prefill engine's rank of the same number."""
        node, described = self._started()
        self._ledger.expect(reserve.id, reserve.request_id, sends=False, quiet=reserve.quiet)
        num_tokens = reserve.num_tokens
        if described.whole_blocks:
            num_tokens = whole_blocks(num_tokens, [group.block_tokens for group in described.groups])
        receive = Receive(
            id=reserve.id,
            request_id=reserve.request_id,
            ticket={},
            num_tokens=num_tokens,
            tables=reserve.tables,
            skip_tokens=reserve.skip_tokens if reserve.tables else num_tokens,
            quiet=reserve.quiet,
        )
        self._receives[reserve.id] = receive
        command = ReserveCommand(
            id=reserve.id,
            blocks=node_tables(_or_holes(reserve.tables, described), described.groups, num_tokens=num_tokens),
            num_tokens=num_tokens,
            ttl_s=self._config.deadline_s,
            skip_tokens=receive.skip_tokens,
            label=label_of(reserve.request_id),
        )
        try:
            ticket = node.submit([command]).get(reserve.id)
            if ticket is not None:
                address = rank_address(reserve.address, self._rank) or reserve.address
                self._announced[reserve.id] = node.announce(
                    ticket, address, key=f"{reserve.key}/{self._rank}", deadline_s=self._config.connect_timeout_s
                )
        except KvlinkError as error:
            self._refused.append(Event(id=reserve.id, tag=None, kind="outcome", error=error))
            self._refused.append(Event(id=reserve.id, tag=None, kind="released"))

    def _look_at_announcements(self) -> None:
        """End reservations of which the prefill engine cannot be told."""
        for reserve_id, announcement in list(self._announced.items()):
            try:
                if announcement.poll():
                    del self._announced[reserve_id]
            except KvlinkError as error:
                del self._announced[reserve_id]
                log.warning("kvlink: prefill cannot be told of a reservation: %s: %s", type(error).__name__, error)
                self._started()[0].submit([Cancel(reserve_id)])

    def _note(self, ended: Ended, report: Report) -> None:
        """Count a command that is over, say why it failed, and find out which blocks that concerns."""
        receive = self._receives.pop(ended.id, None)
        self._tally.add(ended, blocks=0 if receive is None else self._count_blocks(receive))
        if ended.error is None:
            return
        what = "offer" if ended.sends else "pull"
        told = log.info if ended.quiet else log.warning
        told("kvlink: %s of request %s failed: %s: %s", what, ended.request_id, type(ended.error).__name__, ended.error)
        if receive is None or ended.quiet:
            return
        if receive.ticket and not isinstance(ended.error, _NOBODY_TO_TELL):
            self._let_go(receive)
        if not self._one_group:
            return
        bad = self._blocks_of(receive, ended.error)
        if bad:
            # vLLM keeps what lies before the first of them, and recomputes, or fails, the rest.
            self._bad_blocks |= bad
            report.failed.discard(ended.request_id)

    def _let_go(self, receive: Receive) -> None:
        """Read nothing under the ticket of a pull that failed: nobody will try again, and prefill need not wait."""
        node, _ = self._started()
        fresh = Pull(ticket=receive.ticket, blocks=())
        nothing = replace(receive, id=fresh.id, tables=(), skip_tokens=receive.num_tokens, quiet=True)
        try:
            node.submit([self._pull(nothing)])
        except KvlinkError as error:
            log.info("kvlink: prefill keeps request %s until its lease ends: %s", receive.request_id, error)

    def _count_blocks(self, receive: Receive) -> int:
        """Return how many of the scheduler's blocks it fills, over all groups."""
        _, described = self._started()
        if not receive.tables:
            return 0
        first = [receive.skip_tokens // group.block_tokens for group in described.groups]
        last = [-(-receive.num_tokens // group.block_tokens) for group in described.groups]
        tables = [receive.tables[group.index] for group in described.groups]
        return sum(
            sum(1 for block in table[begin:end] if block) for table, begin, end in zip(tables, first, last, strict=True)
        )

    def _blocks_of(self, receive: Receive, error: KvlinkError) -> set[int]:
        _, described = self._started()
        (group,) = described.groups
        table = receive.tables[group.index]
        first = max(receive.skip_tokens, error.valid_prefix_tokens) // group.block_tokens
        return {block for block in table[first : -(-receive.num_tokens // group.block_tokens)] if block}


def _or_holes(tables: Tables, described: DescribedCache) -> Tables:
    """Return `tables`, or empty ones where nothing is wanted."""
    return tables or tuple(() for _ in range(1 + max(group.index for group in described.groups)))
