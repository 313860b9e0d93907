"""What runs inside a process of the soak: a node whose blocks are used again the moment that they are released."""

from __future__ import annotations

import contextlib
import math
import os
import select
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from helpers import two_hosts
from helpers.process_usage import mapped_names, usage
from helpers.processes import wait_until

import kvlink
from kvlink import commands, errors
from kvlink.testing import FaultScript, inject_faults, remove_faults
from soak.deals import Deal, Ended, Ticketed, Worked
from soak.lots import Lot, push_steps
from soak.memory import LAYERS, Shape, TokenMemory

#: Past its deadline by so much, a handoff hangs. Tenths of it come from a machine with more processes than cores.
MOST_LATE_S = 5.0
#: A release waits for peers that are stopped, and for cables that are out, for seconds at most.
MOST_UNRELEASED_S = 20.0
#: Looks that are further apart tell of a process that was stopped, whose lateness is not its own.
_STOPPED_S = 0.25
_LEASE_CAP_S = 4.0
_DROPPED_S = 10.0
_SETTLES_S = 3.0
#: A handoff that has begun under one script may end so much later.
_EXPLAINED_S = 10.0
#: What a node may say to something new at any time. That blocks are busy it must never say: the pool gave them out.
_REFUSALS = (errors.NotReady, errors.Busy)
#: What no disturbance of the soak explains, but a script on the target's own lanes may.
_NEVER = {
    "AuthenticationFailed", "BlocksBusy", "DataCorrupted", "InvalidArgument", "LayoutMismatch", "ProtocolError",
    "TicketInvalid", "UnsupportedMemory", "VersionMismatch",
}  # fmt: skip
_TAGS_A_BIRTH = 1 << 18


class Member:
    """A node, its memory, and the handoffs that it has a side of."""

    def open(self, name: str, shape: Shape, *, birth: int, limits: dict[str, Any], **options: Any) -> str:
        """Start the node; returns its address. `birth` tells its fillings from those of all other processes."""
        self._memory = TokenMemory(shape)
        self._pool = kvlink.BlockPool(shape.blocks, shuffle_seed=birth)
        limits = {"lease_cap_s": _LEASE_CAP_S, "push_at_once_tokens": 8, **limits}
        self._node = kvlink.Node(
            self._memory.cache, name=name, copy_threads=1, limits=kvlink.Limits(**limits), **options
        )
        self._mint = kvlink.TicketMint([self._node.descriptor])
        self._birth, self._filled = birth, 0
        self._users: Counter[int] = Counter()
        self._owners: dict[int, Lot] = {}
        self._lots: list[Lot] = []
        self._kept: list[tuple[float, Lot]] = []
        self._given: dict[int, Lot] = {}
        self._by_command: dict[str, Lot] = {}
        self._worked = Worked()
        self._started = 0
        self._looked_at = self._back_at = time.monotonic()
        self._explained: dict[str, float] = {}
        self._leaks = self._loses = self._releases_early = self._is_scripted = False
        self._lost: list[Any] = []
        return self._node.address

    def give(self, deals: Sequence[Deal]) -> list[Ticketed | None]:
        """Fill blocks for each deal, and offer those that are pulled. None for those that there is no room for."""
        return [self._give(deal) for deal in deals]

    def _give(self, deal: Deal) -> Ticketed | None:
        role, early = "push" if deal.pushed else "offer", deal.frees_early[0]
        blocks = self._take_blocks(deal, shared=self._prefix() if deal.shares_prefix else [])
        if blocks is None:
            return None
        lasts_s = deal.deadline_s if deal.pushed else max(deal.ttl_s, _LEASE_CAP_S)
        lot = Lot(deal, role, blocks, cancels=deal.source_cancels, frees_early=early, lasts_s=lasts_s)
        lot.tags = self._memory.tags[blocks].ravel()[: deal.num_tokens].copy()
        ticketed = Ticketed(deal=deal, ticket=None, tags=lot.tags, filled_at=time.monotonic())
        if deal.pushed:
            self._given[deal.number] = lot
            return ticketed
        payload, common = str(deal.number).encode(), {"label": str(deal.number), "integrity": deal.integrity}
        readers = len(deal.targets)
        try:
            if deal.by_events[0]:
                minted = self._mint.offer(num_tokens=deal.num_tokens, ttl_s=deal.ttl_s, readers=readers)
                self._submit(lot, commands.Offer(blocks=blocks, ticket=minted, payload=payload, **common))
                ticketed.ticket = minted
            else:
                lot.handle = self._node.offer(
                    blocks, num_tokens=deal.num_tokens, ttl_s=deal.ttl_s, readers=readers, payload=payload, **common
                )
                ticketed.ticket = lot.handle.ticket
        except _REFUSALS:
            self._give_back(lot)
            return None
        self._keep(lot)
        return ticketed

    def take(self, orders: Sequence[Ticketed]) -> list[tuple[bool, Any]]:
        """Start a pull for each, or reserve; returns whether it has begun, and the ticket of what is reserved."""
        return [self._take(order) for order in orders]

    def _take(self, order: Ticketed) -> tuple[bool, Any]:
        deal = order.deal
        blocks = self._take_blocks(deal, shared=[])
        if blocks is None:
            return False, None
        role, lasts_s = ("slot", deal.ttl_s) if deal.pushed else ("pull", deal.deadline_s)
        lot = Lot(deal, role, blocks, cancels=deal.target_cancels, frees_early=deal.frees_early[1], lasts_s=lasts_s)
        lot.tags, lot.filled_at = order.tags, order.filled_at
        options = {"skip_tokens": deal.skip_tokens, "require": deal.lane, "label": str(deal.number)}
        ticket = None
        try:
            if deal.pushed and deal.by_events[1]:
                command = commands.Reserve(blocks=blocks, num_tokens=deal.num_tokens, ttl_s=deal.ttl_s, **options)
                ticket = self._submit(lot, command)
            elif deal.pushed:
                lot.handle = self._node.reserve(blocks, num_tokens=deal.num_tokens, ttl_s=deal.ttl_s, **options)
                ticket = lot.handle.ticket
            elif deal.by_events[1]:
                self._submit(
                    lot, commands.Pull(ticket=order.ticket, blocks=blocks, deadline_s=deal.deadline_s, **options)
                )
            else:
                lot.handle = self._node.pull(order.ticket, blocks, deadline_s=deal.deadline_s, **options)
        except _REFUSALS:
            self._give_back(lot)
            return False, None
        self._keep(lot)
        return True, ticket

    def push(self, orders: Sequence[Ticketed]) -> list[int]:
        """Push what was filled before into what was reserved, if there is a ticket; returns the deals that begin."""
        begun = []
        for order in orders:
            lot = self._given.pop(order.deal.number)
            if order.ticket is None:
                self._give_back(lot)
                continue
            first = len(lot.blocks) // 2
            try:
                lot.handle = self._node.push(
                    order.ticket, lot.blocks[:first], deadline_s=order.deal.deadline_s, integrity=order.deal.integrity
                )
            except _REFUSALS:
                self._give_back(lot)
                continue
            lot.steps = push_steps(order.deal, lot.blocks, LAYERS, first)
            lot.began = time.monotonic()
            lot.ends_at = lot.began + order.deal.deadline_s
            self._keep(lot)
            begun.append(order.deal.number)
        return begun

    def work(self, seconds: float, *, until_idle: bool = False) -> Worked:
        """Look after everything that lives, for so long at most; returns what has ended.

        Raises
        ------
        AssertionError
            For a wrong byte, a handoff that hangs, or anything else that must never be.
        """
        until = time.monotonic() + seconds
        while True:
            now = time.monotonic()
            self._look(now, drops_kept=until_idle)
            if now >= until or (until_idle and not self._lots):
                break
            is_watched = any(lot.steps or (lot.cancels and not lot.cancelled_in) for lot in self._lots)
            select.select([self._node.fileno()], [], [], min(until - now, 0.0005 if is_watched else 0.02))
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._node.fileno())
        self._check()
        worked, self._worked = self._worked, Worked()
        return worked

    def settle(self, most_s: float) -> Worked:
        """Let everything end, and compare every count with what it must be."""
        worked = self.work(most_s, until_idle=True)
        assert not self._lots, (
            f"live still after {most_s} s: {[(lot.deal.number, lot.role, lot.handle) for lot in self._lots]}"
        )
        counts = self._pool.counts()
        assert counts == (self._pool.num_blocks, 0, 0), f"blocks are lost: {self._pool}"
        holds = self._node.holds()
        assert not any(holds.values()), holds
        counted = self._node.counters()
        begun = sum(counted[kind] for kind in ("offers", "pulls", "reservations", "pushes"))
        assert counted["succeeded"] + counted["failed"] == begun == self._started, (self._started, counted)
        assert not counted["protocol_errors"], f"{self._node.name}: {counted}"
        self._memory.fill(range(self._memory.shape.blocks), self._new_tags(self._memory.shape.tokens))
        return worked

    def usage_alone(self, neighbours: Sequence[str], before: dict[str, int]) -> dict[str, int]:
        """Disconnect everybody, and tell what the process uses then; connections for questions stay, and count apart.

        What UCX and a peer have to close takes a moment: it has one to come down to what it was `before`.
        """
        for name in neighbours:
            self._node.drop_peer(name)
        wait_until(
            lambda: not self._node.peers(), timeout_s=_DROPPED_S, what=lambda: f"peers left: {self._node.peers()}"
        )
        counted = ("descriptors", "mappings", "threads")
        with contextlib.suppress(AssertionError):
            wait_until(
                lambda: all((now := self._usage())[what] <= before.get(what, now[what]) for what in counted),
                timeout_s=_SETTLES_S,
                what="as before",
            )
        return self._usage()

    def mapped_names(self) -> Counter[str]:
        """What has a name in the process's memory, counted by it."""
        return mapped_names()

    def _usage(self) -> dict[str, int]:
        used, running = usage(), self._node._running
        asking = sum(map(len, list(running.life.asker._idle.values())))
        answering = len(running.answerer._sessions)
        used["descriptors"] -= asking + answering
        used["threads"] -= answering
        return {**used, "connections for questions": asking + answering}

    def inject(self, script: FaultScript | None) -> None:
        """Stretch and disturb what is pulled from now on, or no more."""
        if self._is_scripted:
            return
        self._explain("DataCorrupted", script is not None and script.corrupt > 0)
        self._explain("ProtocolError", script is not None and script.duplicate > 0)
        if script is not None:
            inject_faults(self._node, script)
        else:
            remove_faults(self._node)

    def _explain(self, error: str, explains: bool) -> None:
        """Expect an error, or no more of it than handoffs that live still may meet."""
        if explains:
            self._explained[error] = math.inf
        elif error in self._explained:
            self._explained[error] = min(self._explained[error], time.monotonic() + _EXPLAINED_S)

    def drop_peer(self, name: str) -> None:
        """Disconnect a peer in the middle of everything."""
        self._node.drop_peer(name)

    def rotate(self, secrets: list[str]) -> None:
        """Have other secrets from now on."""
        self._node.rotate_secret(secrets)

    def suspend_and_resume(self, deadline_s: float) -> None:
        """End this life of the node, let everything of it end, and begin another over the same memory."""
        self._node.suspend(deadline_s=deadline_s)
        self._node.resume(self._memory.cache)
        self._mint = kvlink.TicketMint([self._node.descriptor])

    def plant(self, what: str, seed: int) -> None:
        """Do what the soak has to find: the negative control."""
        rng = np.random.default_rng(seed)
        if what == "stray write":
            safe = [block for block in range(self._memory.shape.blocks) if block not in self._written()]
            self._memory.turn_a_bit(rng, int(rng.choice(safe)))
        elif what == "lost block":
            self._loses = True
        elif what == "flipped bit":
            self._explain("DataCorrupted", True)
            self.inject(FaultScript(seed=seed, corrupt=1.0))
            self._is_scripted = True
        elif what == "early release":
            self._releases_early = True
            self.inject(FaultScript(seed=seed, like_rc=True, delay_ms=20, reorder=True, error_after_s=0.02))
            self._is_scripted = True
        else:
            assert what == "leaked descriptors", what
            self._leaks = True

    def close(self) -> None:
        """Close the node."""
        self._node.close()

    def _keep(self, lot: Lot) -> None:
        self._started += 1
        self._pool.give(lot.blocks, lot)
        self._lots.append(lot)
        self._worked.most_live = max(self._worked.most_live, len(self._lots))
        lot.maybe_cancel(self._node, time.monotonic())

    def _submit(self, lot: Lot, command: Any) -> Any:
        lot.command_id = command.id
        self._by_command[command.id] = lot
        return self._node.submit([command], tag=lot.deal.number).get(command.id)

    def _take_blocks(self, deal: Deal, *, shared: list[int]) -> list[int] | None:
        """Return blocks for a deal, freshly filled but for those of a shared prefix; None without room."""
        count = -(-deal.num_tokens // self._memory.shape.block_tokens)
        shared = shared[: max(0, count - 1)]
        try:
            fresh = list(self._pool.allocate(count - len(shared)))
        except errors.OutOfMemory:
            self._worked.full += 1
            return None
        self._check(fresh)
        self._refill(fresh)
        for block in fresh:
            self._owners.pop(block, None)
        self._users.update(shared + fresh)
        return shared + fresh

    def _prefix(self) -> list[int]:
        """The blocks of something that is read or kept here already, and stays held."""
        for lot in [*(lot for lot in self._lots if not lot.is_target), *(lot for _, lot in self._kept)]:
            if not lot.freed:
                return lot.blocks
        return []

    def _give_back(self, lot: Lot) -> None:
        """Let go of what a handoff was given and has not freed."""
        if lot.freed:
            return
        lot.freed = True
        self._users.subtract(lot.blocks)
        if self._loses and lot.blocks:
            self._loses, self._users[lot.blocks[0]] = False, 1  # nobody has it, and nobody ever gives it back
        self._pool.free([block for block in lot.blocks if self._users[block] == 0])

    def _new_tags(self, count: int) -> np.ndarray:
        first = self._filled
        self._filled += count
        return (self._birth * _TAGS_A_BIRTH + (first + np.arange(count)) % _TAGS_A_BIRTH).astype(np.uint32)

    def _refill(self, blocks: Sequence[int]) -> None:
        if blocks:
            self._memory.fill(blocks, self._new_tags(len(blocks) * self._memory.shape.block_tokens))

    def _look(self, now: float, *, drops_kept: bool) -> None:
        for event in self._node.completions():
            if event.id in self._by_command:  # and not a step of a push
                self._by_command[event.id].add_event(event)
        if self._leaks:
            self._lost.append(os.open("/dev/null", os.O_RDONLY))
        if now - self._looked_at > _STOPPED_S:
            self._back_at = now
        self._looked_at = now
        for lot in list(self._lots):
            lot.maybe_cancel(self._node, now)
            lot.step()
            self._look_at(lot, now)
        for until, lot in list(self._kept):
            if drops_kept or now >= until:
                self._kept.remove((until, lot))
                self._give_back(lot)

    def _look_at(self, lot: Lot, now: float) -> None:
        if lot.outcome_at is None and lot.outcome is None:
            if now > lot.ends_at:
                lot.late_s = now - max(lot.ends_at, self._back_at)
                assert lot.late_s < MOST_LATE_S, (
                    f"deal {lot.deal.number}: no outcome {lot.late_s:.1f} s late: {lot.handle}"
                )
            return
        if lot.outcome_at is None:
            lot.outcome_at = now
            self._note_outcome(lot)
        if lot.released:
            self._note_release(lot, now)
        else:
            assert now - max(lot.outcome_at, self._back_at) < MOST_UNRELEASED_S, f"never released: {lot.handle}"

    def _note_outcome(self, lot: Lot) -> None:
        error = lot.error
        assert error is not None or not lot.must_fail, f"deal {lot.deal.number}: a push has succeeded that had failed"
        if error is None and lot.is_target:
            self._verify(lot)
        if error is not None:
            name = type(error).__name__
            explained = lot.is_target and time.monotonic() < self._explained.get(name, 0.0)
            if name == "DataCorrupted":
                lot.suspect = not explained and not lot.may_have_lapsed(time.monotonic())
            elif name in _NEVER:
                assert explained, f"deal {lot.deal.number}, {lot.role}: {name}: {error}"
        if self._releases_early and error is not None and lot.is_target:
            self._refill(lot.blocks)  # an engine that takes the outcome for the release
        elif error is None and lot.is_target:
            self._kept.append((time.monotonic() + lot.deal.kept_s, lot))
        elif lot.frees_early:
            self._own(lot)
            self._give_back(lot)  # the pool keeps them back until they are released

    def _own(self, lot: Lot) -> None:
        for block in lot.blocks:
            if self._users[block] == 1:
                self._owners[block] = lot

    def _note_release(self, lot: Lot, now: float) -> None:
        self._lots.remove(lot)
        self._by_command.pop(lot.command_id, None)
        if lot.handle is None and not lot.events[1].handoff:
            self._started -= 1  # the node has refused it, which the command learns by events
        if lot.is_target and lot.error is not None:
            owned = [block for block in lot.blocks if not lot.freed or self._owners.get(block) is lot]
            if self._releases_early:
                self._check()
            else:
                self._check_untouched(lot)
            self._refill(owned)
        elif not lot.is_target and not lot.freed:
            self._refill([block for block in lot.blocks if self._users[block] == 1])
        if lot.error is not None or not lot.is_target:
            self._give_back(lot)
        error = lot.error
        assert lot.outcome_at is not None
        self._worked.ended.append(
            Ended(
                number=lot.deal.number,
                role=lot.role,
                error=None if error is None else type(error).__name__,
                message="" if error is None else str(error),
                lane=lot.lane,
                nbytes=lot.nbytes if error is None else 0,
                cancelled_in=lot.cancelled_in,
                suspect=lot.suspect,
                late_s=lot.late_s,
                released_after_s=now - lot.outcome_at,
            )
        )

    def _verify(self, lot: Lot) -> None:
        """Compare every byte of a success, what was not asked for too."""
        assert lot.payload == str(lot.deal.number).encode(), f"deal {lot.deal.number}: payload {lot.payload!r}"
        tags = self._memory.tags[lot.blocks].ravel()
        tags[lot.deal.skip_tokens : lot.deal.num_tokens] = lot.tags[lot.deal.skip_tokens :]
        self._memory.tags[lot.blocks] = tags.reshape(len(lot.blocks), self._memory.shape.block_tokens)
        wrong = self._memory.wrong_words(lot.blocks)
        assert not wrong, (
            f"deal {lot.deal.number} on {lot.lane} succeeded with {wrong} wrong words: "
            f"{self._memory.tell_wrong(lot.blocks)}, {lot.deal}"
        )

    def _check_untouched(self, lot: Lot) -> None:
        """What a handoff was not asked to write it has not written, whatever came of it."""
        if lot.freed or not lot.blocks:
            return
        slots = np.ones(len(lot.blocks) * self._memory.shape.block_tokens, bool)
        slots[lot.deal.skip_tokens : lot.deal.num_tokens] = False
        wrong = self._memory.wrong_in(lot.blocks, slots)
        assert not wrong, f"deal {lot.deal.number} wrote {wrong} words that it was not asked for: {lot.deal}"

    def _written(self) -> set[int]:
        """The blocks that a handoff may be writing."""
        early = self._releases_early
        return {
            block
            for lot in self._lots
            if lot.is_target and not (early and lot.outcome_at is not None)
            for block in lot.blocks
            if not lot.freed or self._owners.get(block) is lot
        }

    def _check(self, blocks: Sequence[int] | None = None) -> None:
        """Compare every byte, or every one of some blocks, that nobody may be writing with what is there by right."""
        written = self._written()
        every = range(self._memory.shape.blocks) if blocks is None else blocks
        blocks = [block for block in every if block not in written]
        wrong = self._memory.wrong_words(blocks)
        self._worked.checked_bytes += 4 * self._memory.words_a_block * len(blocks)
        assert not wrong, f"{self._node.name}: somebody wrote {wrong} words: {self._memory.tell_wrong(blocks)}"


def enter_host(*, namespace: str, boot_id: str | None) -> Member:
    """Move this process into a host, and return what obeys calls there."""
    two_hosts.enter(namespace=namespace, boot_id=boot_id)
    return Member()
