"""Leads the soak: gives deals to members, kills, stops and cuts them off in the middle, and keeps the books."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from helpers.two_hosts import Network

from soak.books import Books
from soak.deals import Deal, Ticketed
from soak.draws import Disturbance, draw_tick, roll_call
from soak.towns import Resident, residents

_log = logging.getLogger("soak")
SECRETS = (["one"], ["one", "two"], ["two", "one"], ["two"], ["two", "one"], ["one", "two"])
#: A member answers after its work; one that does not has hung.
_ANSWER_S = 60.0
_SETTLED_S = 30.0
_AT_ONCE = 3


class Conductor:
    """One run, from the first process to the last."""

    def __init__(
        self, *, seed: int, network: Network | None, quiet_ticks: int, plant: str = "", only: Sequence[str] = ()
    ) -> None:
        self.seed, self.quiet_ticks, self._plant = seed, quiet_ticks, plant
        self.books = Books()
        self.members = [member for member in residents(network) if not only or member.name in only]
        self._network = network
        self._by_name = {member.name: member for member in self.members}
        self._births = self._deals = self._turns = 0
        self._shelf: dict[int, list[Ticketed]] = defaultdict(list)
        self._cables_out: dict[str, int] = {}
        self.tick = 0
        self._began = time.monotonic()

    def run(self, seconds: float) -> None:
        """Start all members, go on for so long, and end them; the books tell the rest.

        Raises
        ------
        WorkerFailed, AssertionError
            What must never be has been.
        """
        for member in self.members:
            self._start(member)
        self._quiet()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.tick += 1
            self._one_tick()
            if self.tick % self.quiet_ticks == 0:
                self._quiet()
        self._quiet()
        for member in self.members:
            member.call("close")
            assert member.worker is not None
            code = member.worker.close()
            assert code == 0, f"{member.name} ended with {code}: {member.worker.stderr()}"

    def stderr(self) -> str:
        """What members have written to their standard error."""
        told = {member.name: member.worker.stderr().strip() for member in self.members if member.worker is not None}
        return "".join(f"\n{name}: {text}" for name, text in told.items() if text)

    def end(self) -> None:
        """Kill whatever is left."""
        for member in self.members:
            if member.worker is not None:
                member.worker.kill()

    def _start(self, member: Resident) -> None:
        self._births += 1
        member.start(self._births, SECRETS[self._turns % len(SECRETS)])

    def _one_tick(self) -> None:
        self._bring_back()
        drawn = draw_tick(self.seed, self.tick, self.members, first_deal=self._deals)
        self._deals += len(drawn.deals)
        present = [member for member in self.members if member.stopped_until is None]
        names = {member.name for member in present}
        self._each((self._by_name[name], (script,)) for name, script in drawn.scripts.items() if name in names)(
            "inject"
        )
        if self._plant and self.tick == self.quiet_ticks // 2:
            for member in present:
                member.call("plant", self._plant, self.seed)
        orders = self._give([deal for deal in drawn.deals if deal.source in names])
        for order in [order for order in orders if order.deal.late and not order.deal.pushed]:
            orders.remove(order)
            self._shelf[self.tick + order.deal.late].append(order)
        self._take(orders + self._shelf.pop(self.tick, []), names)
        self._work(present, drawn.work_s, drawn.disturbance)

    def _give(self, deals: Sequence[Deal]) -> list[Ticketed]:
        by_source: dict[str, list[Deal]] = defaultdict(list)
        for deal in deals:
            by_source[deal.source].append(deal)
        given = self._each((self._by_name[name], (of_one,)) for name, of_one in by_source.items())("give")
        orders = [order for of_one in given for order in of_one if order is not None]
        for order in orders:
            if not order.deal.pushed:
                self.books.expect(order.deal, "offer", order.deal.source)
        return orders

    def _take(self, orders: Sequence[Ticketed], names: set[str]) -> None:
        by_target: dict[str, list[Ticketed]] = defaultdict(list)
        by_source: dict[str, list[Ticketed]] = defaultdict(list)
        for order in orders:
            for target in order.deal.targets:
                if target in names:
                    by_target[target].append(order)
            if order.deal.pushed:
                by_source[order.deal.source].append(order)
        answers = self._each((self._by_name[name], (of_one,)) for name, of_one in by_target.items())("take")
        for name, tickets in zip(by_target, answers, strict=True):
            for order, (started, ticket) in zip(by_target[name], tickets, strict=True):
                if started:
                    self.books.expect(order.deal, "slot" if order.deal.pushed else "pull", name)
                if order.deal.pushed:
                    order.ticket = ticket
        started = self._each((self._by_name[name], (of_one,)) for name, of_one in by_source.items())("push")
        for name, pushes in zip(by_source, started, strict=True):
            for number in pushes:
                deal = next(order.deal for order in by_source[name] if order.deal.number == number)
                self.books.expect(deal, "push", name)

    def _work(self, present: list[Resident], work_s: float, disturbance: Disturbance | None) -> None:
        whom = self._by_name[disturbance.whom] if disturbance is not None else None
        kind = disturbance.kind if disturbance is not None else ""
        if kind in ("kill", "suspend"):
            # UCX takes no interface without a carrier, and looks at them only when a node starts its life.
            self._put_cable(whom)
        if whom is not None and whom in present and kind in ("suspend", "drop"):
            arguments = (0.02,) if kind == "suspend" else (disturbance.other,)
            if kind == "suspend":
                self.books.note_suspended(whom.name)
            whom.call("suspend_and_resume" if kind == "suspend" else "drop_peer", *arguments)
            self.books.disturbed[kind] += 1
        for member in present:
            member.worker.start("work", work_s)
        if disturbance is not None and kind in ("kill", "stop", "cable"):
            _pause(disturbance.after_s)
            self._disturb(disturbance, whom, was_present=whom in present)
        for member in present:
            if member.stopped_until is None and not (kind == "kill" and member is whom):
                self.books.add(member.name, member.worker.result(timeout_s=_ANSWER_S))
        if kind == "kill":
            self.books.forget(whom.name)
            self._start(whom)

    def _disturb(self, disturbance: Disturbance, whom: Resident, *, was_present: bool) -> None:
        kind = disturbance.kind
        if kind == "kill":
            whom.worker.kill()
        elif kind == "stop" and was_present:
            whom.worker.pause()
            whom.stopped_until = self.tick + disturbance.ticks
        elif kind == "cable" and whom.name not in self._cables_out:
            self._network.pull_cable(whom.host)
            self._cables_out[whom.name] = self.tick + disturbance.ticks
        else:
            return
        self.books.disturbed[kind] += 1

    def _bring_back(self, *, all_of_them: bool = False) -> None:
        """Let members that were stopped go on, and put cables back, if it is time for that."""
        for name, until in list(self._cables_out.items()):
            if all_of_them or self.tick >= until:
                self._put_cable(self._by_name[name])
        for member in self.members:
            if member.stopped_until is not None and (all_of_them or self.tick >= member.stopped_until):
                member.worker.resume()
                member.stopped_until = None
                self.books.add(member.name, member.worker.result(timeout_s=_ANSWER_S))

    def _put_cable(self, member: Resident) -> None:
        if self._cables_out.pop(member.name, None) is not None:
            self._network.put_cable(member.host)

    def _quiet(self) -> None:
        """Let everything end, compare all counts, hand over once between all, and look at what each process uses."""
        self._bring_back(all_of_them=True)
        self._shelf.clear()
        self._each((member, (None,)) for member in self.members)("inject")
        self._settle()
        self._turns += 1
        self._each((member, (SECRETS[self._turns % len(SECRETS)],)) for member in self.members)("rotate")
        calls = roll_call(self.members, first_deal=self._deals)
        self._deals += len(calls)
        for some in _with_room(calls):
            self._take(self._give(some), set(self._by_name))
            self._settle()
        self.books.check_roll_call({deal.number for deal in calls}, pairs=len(calls))
        self._settle()
        asked = ((member, (self._neighbours(member), (member.usages[1:2] or [{}])[0])) for member in self.members)
        for member, used in zip(self.members, self._each(asked)("usage_alone"), strict=True):
            member.usages.append(used)
        for member, names in zip(
            self.members, self._each((one, ()) for one in self.members)("mapped_names"), strict=True
        ):
            member.mapped.append(names)
            del member.mapped[2:-1]  # the second, when all has happened once, and the last
        self.books.quiet_points += 1
        done, disturbed = self.books, dict(self.books.disturbed)
        _log.info(
            "%d s, tick %d: %d handoffs, %d arrived, %s",
            *(time.monotonic() - self._began, self.tick, done.handoffs, sum(done.lanes.values()), disturbed),
        )
        self.books.check_nothing_open()

    def _settle(self) -> None:
        settled = self._each((member, (_SETTLED_S,)) for member in self.members)("settle")
        for member, worked in zip(self.members, settled, strict=True):
            self.books.add(member.name, worked)

    def _neighbours(self, member: Resident) -> list[str]:
        return [other.name for other in self.members if other.town == member.town and other is not member]

    def _each(self, calls: Iterable[tuple[Resident, tuple[Any, ...]]]) -> Callable[[str], list[Any]]:
        """Call a method of several members at the same time."""
        chosen = list(calls)

        def call(method: str) -> list[Any]:
            for member, arguments in chosen:
                member.worker.start(method, *arguments)
            return [member.worker.result(timeout_s=_ANSWER_S) for member, _ in chosen]

        return call


def _with_room(calls: Sequence[Deal]) -> list[list[Deal]]:
    """A few at a time, so that nobody has more of them than its small pool has blocks for."""
    batches: list[list[Deal]] = []
    for deal in calls:
        for batch in batches:
            busy = [name for other in batch for name in (other.source, *other.targets)]
            if max(busy.count(deal.source), busy.count(deal.targets[0])) < _AT_ONCE:
                batch.append(deal)
                break
        else:
            batches.append([deal])
    return batches


def _pause(seconds: float) -> None:
    threading.Event().wait(seconds)
