"""The half in vLLM's scheduler: decides what is offered and pulled, and mints the tickets. It has no node."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from kvlink.commands import Offer, Pull, Push
from kvlink.commands import Reserve as ReserveCommand
from kvlink.engines.vllm.config import ConnectorConfig
from kvlink.engines.vllm.layouts import CacheGroup
from kvlink.engines.vllm.messages import (
    Expect,
    Finish,
    Progress,
    Receive,
    Reserve,
    Send,
    StepOrders,
    Tables,
    WorkerFacts,
)
from kvlink.engines.vllm.params import (
    EngineFacts,
    Meeting,
    RemotePrefill,
    prefilled,
    pushed,
    wants_prefill_kept,
    wants_remote_prefill,
)
from kvlink.engines.vllm.tables import whole_blocks
from kvlink.errors import KvlinkError, TicketInvalid
from kvlink.handoff import TicketMint

__all__ = ["SchedulerFacts", "SchedulerHalf"]

log = logging.getLogger("vllm.kvlink")

_HANDED_OVER = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")
_TRUNCATED = "_kvlink_truncated"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerFacts:
    """What the scheduler half must know of its engine.

    Attributes
    ----------
    held_back_tokens
        Tokens at the end of a prompt that prefill leaves to decode: decode computes them again anyway, and their
        windows, or the drafts that follow them, must then be as if they were new.
    """

    engine: EngineFacts
    groups: tuple[CacheGroup, ...]
    held_back_tokens: int = 0


class SchedulerHalf:
    """One engine's scheduler, with regard to handoffs. Called by its one thread.

    `request` stands for vLLM's ``Request`` everywhere.
    """

    def __init__(self, facts: SchedulerFacts, config: ConnectorConfig) -> None:
        self._facts = facts
        self._config = config
        self._mint: TicketMint | None = None
        self._whole_blocks = False
        self._orders = StepOrders()
        self._pulling: dict[str, str] = {}  # by request, the command that vLLM waits for
        self._pushing: dict[str, Expect] = {}  # by request
        # Blocks that a window has left behind are given to others while the prompt is computed still.
        self._may_push = config.push and all(group.window is None for group in facts.groups)
        self._causes: dict[str, int] = {}  # why requests were refused here, since they were last asked for

    def meet_workers(self, workers: Mapping[tuple[int, int], WorkerFacts]) -> None:
        """Learn who the workers are, by (pipeline rank, tensor rank), once they have nodes."""
        facts = [workers[place] for place in sorted(workers)]
        self._mint = TicketMint(one.descriptor for one in facts)
        self._whole_blocks = any(one.whole_blocks for one in facts)

    def arrived(self, request: Any) -> None:
        """Look at a request that has just come: what must be left to decode is cut off, and a push is expected."""
        self._cut(request)
        params = request.kv_transfer_params
        if not self._may_push or not wants_prefill_kept(params):
            return
        try:
            meeting = Meeting.of(params)
        except TicketInvalid as error:
            log.warning("request %s is not pushed: %s", request.request_id, error)
            self._count(error)
            return
        if meeting is not None:
            command = Push(ticket={}, blocks=())
            expect = Expect(
                id=command.id,
                request_id=request.request_id,
                key=meeting.transfer_id,
                num_tokens=request.num_prompt_tokens,
            )
            self._pushing[request.request_id] = expect
            self._orders.expects.append(expect)

    def _cut(self, request: Any) -> None:
        params = request.kv_transfer_params
        cut = self._facts.held_back_tokens
        if not cut or not wants_prefill_kept(params) or params.get(_TRUNCATED):
            return
        if request.num_prompt_tokens <= cut or request.get_skip_reading_prefix_cache():
            return
        if request.prompt_token_ids is not None:
            del request.prompt_token_ids[-cut:]
        elif request.prompt_embeds is not None:
            request.prompt_embeds = request.prompt_embeds[:-cut]
        else:
            return
        del request._all_token_ids[-cut:]
        request.num_prompt_tokens -= cut
        request.max_tokens = 1
        params[_TRUNCATED] = True  # it may be preempted, and come again

    def matched(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return how many tokens after the first `num_computed_tokens` are elsewhere; without side effects."""
        if not wants_remote_prefill(request.kv_transfer_params):
            return 0, False
        try:
            meeting = self._meeting(request)
            remote = None if meeting else RemotePrefill.of(request.kv_transfer_params)
        except TicketInvalid:
            return 0, False  # told, and counted, once blocks are allocated
        count = self._usable_tokens(request, remote) - num_computed_tokens
        return (count, True) if count > 0 else (0, False)

    def allocated(self, request: Any, tables: Tables, num_external_tokens: int) -> None:
        """Order the pull of a request that has blocks now; vLLM waits for it if there are external tokens."""
        params = request.kv_transfer_params
        if not wants_remote_prefill(params):
            return
        params["do_remote_prefill"] = False  # one pull a request, whatever comes of it
        try:
            meeting = self._meeting(request)
            remote = None if meeting else RemotePrefill.of({**params, "do_remote_prefill": True})
        except TicketInvalid as error:
            log.warning("request %s is computed here: %s", request.request_id, error)
            self._count(error)
            return
        if num_external_tokens == 0:
            self._let_go(request, meeting or remote)
            return
        if remote is None:
            assert meeting is not None
            self._reserve(request, meeting, tables=tables, num_external_tokens=num_external_tokens)
            return
        end = self._usable_tokens(request, remote)
        self._receive(request.request_id, remote, tables=tables, skip_tokens=end - num_external_tokens)

    def finished(self, request: Any, tables: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """Return whether the blocks of a request that is over must be kept, and what its answer says of them."""
        params = request.kv_transfer_params
        pulling = self._pulling.pop(request.request_id, None)
        if pulling is not None and request.status.name not in _HANDED_OVER:
            self._orders.cancels.append(pulling)
        if wants_remote_prefill(params):
            # It was aborted before it had blocks: prefill must hear that nobody will come.
            params["do_remote_prefill"] = False
            try:
                self._let_go(request, self._meeting(request) or RemotePrefill.of(params))
            except TicketInvalid as error:
                self._count(error)
            return False, None
        if (expect := self._pushing.pop(request.request_id, None)) is not None:
            return self._finish_push(request, expect)
        if not wants_prefill_kept(params) or request.status.name not in _HANDED_OVER:
            return False, None
        num_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        if not num_tokens or not any(tables):
            return False, None
        return self._offer(request.request_id, tables, num_tokens)

    def scheduled(self, request_id: str, tables: Tables, tokens: range) -> None:
        """Hear that a step computes `tokens` of a request, into `tables`."""
        if (expect := self._pushing.get(request_id)) is not None:
            self._orders.progress.append(
                Progress(id=expect.id, tables=tables, first_token=tokens.start, end_token=tokens.stop)
            )

    @property
    def pushing(self) -> Set[str]:
        """The requests of which ``scheduled`` must be told."""
        return self._pushing.keys()

    def preempted(self, request_id: str) -> None:
        """Hear that a request starts over in other blocks: what was pushed of it is of no use."""
        if (expect := self._pushing.pop(request_id, None)) is not None:
            self._orders.finishes.append(Finish(id=expect.id, complete=False, report=False))

    def take_orders(self) -> StepOrders:
        """Return what workers must do that they were not told before."""
        orders, self._orders = self._orders, StepOrders()
        return orders

    def received(self, request_ids: Sequence[str]) -> None:
        """Forget pulls of which vLLM has been told the end."""
        for request_id in request_ids:
            self._pulling.pop(request_id, None)

    def take_causes(self) -> dict[str, int]:
        """Return why requests were not pulled at all, by the names of errors, since the last call."""
        causes, self._causes = self._causes, {}
        return causes

    def _usable_tokens(self, request: Any, remote: RemotePrefill | None) -> int:
        prompt = int(request.num_prompt_tokens)
        if prompt > self._facts.held_back_tokens:
            prompt -= self._facts.held_back_tokens
        return prompt if remote is None else min(prompt, remote.num_tokens)

    def _meeting(self, request: Any) -> Meeting | None:
        """Return how a request's prefill is met that is pushed here; raises ``TicketInvalid`` if that is not said."""
        if not self._may_push:
            return None
        return Meeting.of({**request.kv_transfer_params, "do_remote_prefill": True})

    def _reserve(
        self, request: Any, meeting: Meeting, *, tables: Tables, num_external_tokens: int, quiet: bool = False
    ) -> None:
        end = self._usable_tokens(request, None)
        command = ReserveCommand(blocks=(), num_tokens=end)
        if not quiet:
            self._pulling[request.request_id] = command.id
        self._orders.reserves.append(
            Reserve(
                id=command.id,
                request_id=request.request_id,
                tables=tables,
                num_tokens=end,
                skip_tokens=end - num_external_tokens,
                key=meeting.transfer_id,
                address=meeting.address,
                quiet=quiet,
            )
        )

    def _finish_push(self, request: Any, expect: Expect) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks until the push is over, which one that was aborted soon is."""
        complete = request.status.name in _HANDED_OVER
        self._orders.finishes.append(Finish(id=expect.id, complete=complete))
        told = pushed(self._facts.engine, request.request_id, transfer_id=expect.key, num_tokens=expect.num_tokens)
        return True, told if complete else None

    def _offer(self, request_id: str, tables: Sequence[Sequence[int]], num_tokens: int) -> tuple[bool, dict[str, Any]]:
        if self._mint is None:
            raise KvlinkError(f"offer request {request_id}: no worker has told its descriptor")
        offered = num_tokens
        if self._whole_blocks:
            offered = whole_blocks(num_tokens, [group.block_tokens for group in self._facts.groups])
        ticket = self._mint.offer(num_tokens=offered, ttl_s=self._config.ttl_s)
        fresh = Offer(blocks=(), ticket=ticket)
        self._orders.sends.append(
            Send(id=fresh.id, request_id=request_id, ticket=ticket, tables=tuple(map(tuple, tables)))
        )
        handed_over = [tables[group.index] for group in self._facts.groups]
        return True, prefilled(self._facts.engine, request_id, ticket=ticket, blocks=handed_over, num_tokens=num_tokens)

    def _receive(
        self, request_id: str, remote: RemotePrefill, *, tables: Tables, skip_tokens: int, quiet: bool = False
    ) -> None:
        command = Pull(ticket=remote.ticket, blocks=())
        if not quiet:
            self._pulling[request_id] = command.id
        self._orders.receives.append(
            Receive(
                id=command.id,
                request_id=request_id,
                ticket=remote.ticket,
                num_tokens=remote.parsed.num_tokens,
                tables=tables,
                skip_tokens=skip_tokens,
                quiet=quiet,
            )
        )

    def _let_go(self, request: Any, prefill: RemotePrefill | Meeting | None) -> None:
        """Take nothing, so that prefill gives the blocks free."""
        if isinstance(prefill, RemotePrefill):
            num_tokens = prefill.parsed.num_tokens
            self._receive(request.request_id, prefill, tables=(), skip_tokens=num_tokens, quiet=True)
        elif prefill is not None:
            self._reserve(request, prefill, tables=(), num_external_tokens=0, quiet=True)

    def _count(self, error: KvlinkError) -> None:
        name = type(error).__name__
        self._causes[name] = self._causes.get(name, 0) + 1
