"""Engines of unlike shapes hand over to each other: every rank a process, every element checked, on each lane."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from helpers.markers import LANES, Lane
from helpers.processes import wait_until
from helpers.rank_worker import Rank

import kvlink
from kvlink import errors
from kvlink.testing import Worker

TESTS = Path(__file__).parents[1]
SOURCE_BLOCKS, TARGET_BLOCKS = (6, 1, 4, 9), (0, 7, 3, 10)
NUM_TOKENS = 14


def tensor_parallel(degree: int, *, heads: int = 8, **rank: Any) -> list[Rank]:
    """The ranks of a tensor-parallel engine; they replicate heads when there are more ranks than heads."""
    share, copies = max(1, heads // degree), max(1, degree // heads)
    return [
        Rank(heads=(number // copies * share, (number // copies + 1) * share), total_kv_heads=heads, **rank)
        for number in range(degree)
    ]


def latents(degree: int, **rank: Any) -> list[Rank]:
    """MLA: every rank has all of it."""
    return [Rank(heads=None, axes="block token dim", head_dim=48, **rank) for _ in range(degree)]


def stages(*counts: int, **rank: Any) -> list[Rank]:
    """Pipeline stages with so many layers each."""
    names = iter(f"layers.{number}" for number in range(sum(counts)))
    return [Rank(layers=tuple(next(names) for _ in range(count)), **rank) for count in counts]


SHAPES: dict[str, tuple[list[Rank], list[Rank]]] = {
    "tp2-tp4": (tensor_parallel(2), tensor_parallel(4)),
    "tp4-tp2-hnd": (tensor_parallel(4, axes="kv block head token dim"), tensor_parallel(2)),
    "pp2-tp1": (stages(3, 1), stages(4)),
    "tp4-of-2-heads-tp1": (tensor_parallel(4, heads=2), tensor_parallel(1, heads=2)),
    "tp2-tp4-of-2-heads": (tensor_parallel(2, heads=2), tensor_parallel(4, heads=2)),
    "mla-tp2-tp2": (latents(2), latents(2)),
    "blocks-of-4-to-6": (tensor_parallel(2), tensor_parallel(1, block_tokens=6)),
    "tp1-tp2": (tensor_parallel(1), tensor_parallel(2)),
}
ON_EACH_LANE = [shape for shape in SHAPES if shape != "tp1-tp2"]


class Crew:
    """Rank processes that live as long as the module, by environment, side and number."""

    def __init__(self) -> None:
        self._members: dict[tuple[tuple[tuple[str, str], ...], str, int], Worker] = {}

    def member(self, lane: Lane, side: str, number: int) -> Worker:
        key = (tuple(sorted(lane.env.items())), side, number)
        if key not in self._members:
            self._members[key] = Worker(
                "helpers.rank_worker:RankWorker", env=lane.env, python_path=[str(TESTS)], timeout_s=60
            )
        return self._members[key]

    def close(self) -> None:
        for worker in self._members.values():
            assert worker.close() == 0, worker.stderr()

    def kill(self) -> None:
        for worker in self._members.values():
            worker.kill()


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    found = Crew()
    try:
        yield found
        found.close()
    finally:
        found.kill()


@dataclass(kw_only=True)
class Engines:
    """Two engines that are open, and the mint of the one that prefills."""

    lane: Lane
    sources: list[Worker]
    targets: list[Worker]
    mint: kvlink.TicketMint
    descriptors: list[Any]

    def prefill(self, *, seed: int, blocks: Sequence[int] = SOURCE_BLOCKS, ranks: Sequence[int] | None = None) -> None:
        for number in range(len(self.sources)) if ranks is None else ranks:
            self.sources[number].call("fill", blocks, NUM_TOKENS, seed=seed)

    def offer(self, ticket: Any, **options: Any) -> list[tuple[Worker, int]]:
        """Offer on every rank that the ticket names."""
        named = {source["name"] for source in ticket["sources"]}
        return [
            (worker, worker.call("offer", SOURCE_BLOCKS, ticket=ticket, payload=f"of {number}".encode(), **options))
            for number, worker in enumerate(self.sources)
            if f"source-{number}" in named
        ]

    def pull(self, ticket: Any, **options: Any) -> list[tuple[Worker, int]]:
        """Start a pull on every target rank."""
        return [
            (worker, worker.call("pull", ticket, TARGET_BLOCKS, require=self.lane.lane, **options))
            for worker in self.targets
        ]

    def push(
        self, *, skip_tokens: int = 0, named: bool = True
    ) -> tuple[list[tuple[Worker, int]], list[tuple[Worker, int]]]:
        """Reserve on every target rank for all source ranks, and push from each of those into each reservation."""
        sources = self.descriptors if named else []
        options = {"sources": sources, "require": self.lane.lane, "skip_tokens": skip_tokens}
        slots = [
            (worker, *worker.call("reserve", TARGET_BLOCKS, num_tokens=NUM_TOKENS, **options))
            for worker in self.targets
        ]
        pushes = [
            (worker, worker.call("push", ticket, SOURCE_BLOCKS, payload=f"of {number}".encode()))
            for number, worker in enumerate(self.sources)
            for _, _, ticket in slots
        ]
        return pushes, [(worker, handle) for worker, handle, _ in slots]

    def verify(self, *, seed: int, skip_tokens: int = 0) -> None:
        """Compare every element of every target with its tag, and what was not pulled with what was there."""
        for worker in self.targets:
            worker.call("expect", TARGET_BLOCKS, NUM_TOKENS, seed=seed, skip_tokens=skip_tokens)
            assert worker.call("wrong_elements") == 0

    def assert_nothing_held(self) -> None:
        assert not any(count for worker in (*self.sources, *self.targets) for count in worker.call("holds"))


def opened(crew: Crew, lane: Lane, shape: str, **options: Any) -> Engines:
    sources, targets = ([replace(rank, memory=lane.memory) for rank in side] for side in SHAPES[shape])
    workers: dict[str, list[Worker]] = {"source": [], "target": []}
    for side, ranks in (("source", sources), ("target", targets)):
        for number, rank in enumerate(ranks):
            worker = crew.member(lane, side, number)
            worker.start("open", rank, name=f"{side}-{number}", **options)
            workers[side].append(worker)
    descriptors = [worker.result() for worker in workers["source"]]
    for worker in workers["target"]:
        worker.result()
    return Engines(
        lane=lane,
        sources=workers["source"],
        targets=workers["target"],
        mint=kvlink.TicketMint(descriptors),
        descriptors=descriptors,
    )


def outcomes(handles: list[tuple[Worker, int]]) -> list[tuple[str, int, bytes]]:
    return [worker.call("wait", handle) for worker, handle in handles]


@pytest.mark.parametrize("shape", ON_EACH_LANE)
def test_every_target_rank_gets_exactly_its_part(crew: Crew, lane: Lane, shape: str) -> None:
    engines = opened(crew, lane, shape, limits=kvlink.Limits(push_at_once_tokens=0))
    for seed, way in ((1, "pull"), (2, "push")):  # the second finds all connections
        engines.prefill(seed=seed)
        if way == "push":
            offers, pulls = engines.push()
        else:
            ticket = engines.mint.offer(num_tokens=NUM_TOKENS, readers=len(engines.targets))
            offers = engines.offer(ticket)
            pulls = engines.pull(ticket)
        taken = outcomes(pulls)
        given = outcomes(offers)
        engines.verify(seed=seed)
        assert {payload for _, _, payload in taken} == {b"of 0"}
        assert {used for used, _, _ in taken} == {lane.lane}
        assert sum(nbytes for _, nbytes, _ in given) == sum(nbytes for _, nbytes, _ in taken)
        engines.assert_nothing_held()
    assert all(peer["lane_reason"] for worker in engines.targets for peer in worker.call("peers"))


def test_a_claim_may_come_before_its_offers(crew: Crew, lane: Lane) -> None:
    engines = opened(crew, lane, "tp2-tp4")
    ticket = engines.mint.offer(num_tokens=NUM_TOKENS, readers=4)
    pulls = engines.pull(ticket, skip_tokens=5)
    engines.prefill(seed=3)
    worker, first = engines.targets[0], pulls[0][1]
    wait_until(lambda: worker.call("state", first) == "claiming", timeout_s=10, what="a claim")
    offers = [(engines.sources[0], engines.sources[0].call("offer", SOURCE_BLOCKS, ticket=ticket))]
    assert worker.call("state", first) not in ("succeeded", "failed")
    offers.append((engines.sources[1], engines.sources[1].call("offer", SOURCE_BLOCKS, ticket=ticket)))
    outcomes(pulls)
    outcomes(offers)
    engines.verify(seed=3, skip_tokens=5)
    engines.assert_nothing_held()


@pytest.fixture
def mapped() -> Lane:
    """For what does not depend on the lane."""
    return LANES[0]


@pytest.mark.parametrize(("shape", "named"), [("tp2-tp4", True), ("tp1-tp2", True), ("tp1-tp2", False)])
def test_ranks_that_have_never_met_push_what_is_not_there_yet(
    crew: Crew, mapped: Lane, shape: str, named: bool
) -> None:
    engines = opened(crew, mapped, shape)
    engines.prefill(seed=10)
    pushes, slots = engines.push(skip_tokens=5, named=named)
    assert {payload for _, _, payload in outcomes(slots)} == {b"of 0"}
    outcomes(pushes)
    engines.verify(seed=10, skip_tokens=5)
    engines.assert_nothing_held()


def both_are_ready(peers: list[dict[str, Any]]) -> bool:
    return [peer["state"] for peer in peers] == ["ready", "ready"]


def test_a_rank_that_dies_before_it_pushes_ends_the_reservations_and_the_pushes_of_the_others(
    crew: Crew, mapped: Lane
) -> None:
    engines = opened(crew, mapped, "tp2-tp4")
    with contextlib.closing(Worker("helpers.rank_worker:RankWorker", python_path=[str(TESTS)])) as doomed:
        sources = [engines.descriptors[0], doomed.call("open", SHAPES["tp2-tp4"][0][1], name="source-1")]
        slots = [
            (worker, *worker.call("reserve", TARGET_BLOCKS, num_tokens=NUM_TOKENS, sources=sources))
            for worker in engines.targets
        ]
        pushes = [engines.sources[0].call("push", ticket, SOURCE_BLOCKS, payload=b"") for _, _, ticket in slots]
        for worker in engines.targets:
            wait_until(lambda worker=worker: both_are_ready(worker.call("peers")), timeout_s=10, what="two peers")
        doomed.kill()
        for worker, handle, _ in slots:  # long before their 30 s
            with pytest.raises(errors.PeerLost, match="source-1"):
                worker.call("wait", handle, timeout_s=1)
        for handle in pushes:
            with pytest.raises((errors.Cancelled, errors.UnknownHandoff)):
                engines.sources[0].call("wait", handle, timeout_s=5)
            engines.sources[0].call("wait_until_released", handle)
    engines.assert_nothing_held()


def test_a_push_of_a_rank_that_was_not_named_is_refused_at_once(crew: Crew, mapped: Lane) -> None:
    engines = opened(crew, mapped, "mla-tp2-tp2")
    slot, ticket = engines.targets[0].call(
        "reserve", TARGET_BLOCKS, num_tokens=NUM_TOKENS, sources=engines.descriptors[:1]
    )
    with pytest.raises(errors.InvalidArgument, match="reserved for pushes by source-0, and this is source-1"):
        engines.sources[1].call("push", ticket, SOURCE_BLOCKS, payload=b"")
    pushed = engines.sources[0].call("push", ticket, SOURCE_BLOCKS, payload=b"")
    outcomes([(engines.targets[0], slot), (engines.sources[0], pushed)])
    engines.assert_nothing_held()


def test_an_offer_stands_until_every_target_rank_has_read(crew: Crew, mapped: Lane) -> None:
    engines = opened(crew, mapped, "mla-tp2-tp2")
    engines.prefill(seed=4)
    ticket = engines.mint.offer(num_tokens=NUM_TOKENS, readers=2)
    offers = engines.offer(ticket)
    outcomes([(engines.targets[0], engines.targets[0].call("pull", ticket, TARGET_BLOCKS))])
    assert [worker.call("state", handle) for worker, handle in offers] == ["granted", "granted"]
    outcomes([(engines.targets[1], engines.targets[1].call("pull", ticket, TARGET_BLOCKS))])
    # One source of the two gave everything to a target, and the other confirmed nothing but its claim.
    outcomes(offers)
    engines.verify(seed=4)
    engines.assert_nothing_held()


def test_data_parallel_ranks_are_named_by_the_ticket(crew: Crew, mapped: Lane) -> None:
    engines = opened(crew, mapped, "mla-tp2-tp2")
    engines.prefill(seed=5, ranks=[1])
    ticket = engines.mint.offer(num_tokens=NUM_TOKENS, readers=2, ranks=[1])
    offers = engines.offer(ticket)
    assert len(offers) == 1
    assert {payload for _, _, payload in outcomes(engines.pull(ticket))} == {b"of 1"}
    outcomes(offers)
    engines.verify(seed=5)
    engines.assert_nothing_held()


def test_an_offer_that_never_comes_fails_the_pull_and_holds_nothing(crew: Crew, mapped: Lane) -> None:
    engines = opened(crew, mapped, "tp2-tp4")
    engines.prefill(seed=6)
    ticket = engines.mint.offer(num_tokens=NUM_TOKENS, readers=4)
    offered = engines.sources[0].call("offer", SOURCE_BLOCKS, ticket=ticket)
    pulls = engines.pull(ticket, deadline_s=0.5)
    for worker, handle in pulls:
        with pytest.raises((errors.DeadlineExceeded, errors.UnknownHandoff)):
            worker.call("wait", handle, timeout_s=5)
        worker.call("wait_until_released", handle)
    engines.sources[0].call("cancel", offered)
    engines.sources[0].call("wait_until_released", offered)
    engines.assert_nothing_held()


def test_the_heads_of_a_rank_that_never_offers_are_among_what_did_not_arrive(crew: Crew, mapped: Lane) -> None:
    engines = opened(crew, mapped, "tp4-tp2-hnd")
    engines.prefill(seed=9)
    # Connections stay, so that only the offers tell the two tickets apart.
    ticket = engines.mint.offer(num_tokens=NUM_TOKENS, readers=2)
    offers, pulls = engines.offer(ticket), engines.pull(ticket)
    outcomes(pulls)
    outcomes(offers)
    ticket = engines.mint.offer(num_tokens=NUM_TOKENS, readers=2)
    offered = [worker.call("offer", SOURCE_BLOCKS, ticket=ticket) for worker in engines.sources[1:]]
    pulls = engines.pull(ticket, deadline_s=0.5, skip_tokens=3)
    named = []
    for worker, handle in pulls:
        with pytest.raises((errors.DeadlineExceeded, errors.UnknownHandoff)):
            worker.call("wait", handle, timeout_s=5)
        worker.call("wait_until_released", handle)
        named += worker.call("failed", handle)
    # Each target draws two heads from each of two ranks, of which the first of all never offers. No byte is called
    # right before all of a pull is, so the heads of its neighbour are named too.
    assert {one[3:] for one in named if one.first_head < 4} == {(0, 2, 3, 14), (2, 4, 3, 14)}
    assert {one[:3] for one in named} == {
        ("full", layer, component) for layer in ("layers.0", "layers.1") for component in "kv"
    }
    for worker, handle in zip(engines.sources[1:], offered, strict=True):
        worker.call("cancel", handle)
        worker.call("wait_until_released", handle)
    engines.assert_nothing_held()


def test_one_ticket_is_offered_once_on_a_rank(crew: Crew, mapped: Lane) -> None:
    engines = opened(crew, mapped, "pp2-tp1")
    engines.prefill(seed=7)
    ticket = engines.mint.offer(num_tokens=NUM_TOKENS)
    offers = engines.offer(ticket)
    again = engines.sources[0].call("offer", SOURCE_BLOCKS, ticket=ticket)
    with pytest.raises(errors.InvalidArgument, match="offered here before"):
        engines.sources[0].call("wait", again)
    outcomes(engines.pull(ticket))
    outcomes(offers)
    engines.verify(seed=7)
    engines.assert_nothing_held()


def test_ranks_that_do_not_fit_are_refused_with_both_values(crew: Crew, mapped: Lane) -> None:
    engines = opened(crew, mapped, "pp2-tp1")
    ticket = engines.mint.offer(num_tokens=NUM_TOKENS, ranks=[1])
    ((worker, handle),) = engines.pull(ticket)
    with pytest.raises(errors.LayoutMismatch, match=r"layers .*has layers\.3, the target has layers\.0, layers\.1"):
        worker.call("wait", handle)
    assert worker.call("wait_until_released", handle) == "LayoutMismatch"
    engines.assert_nothing_held()


def test_a_rank_that_dies_fails_the_pull_and_the_next_one_meets_its_successor(crew: Crew, mapped: Lane) -> None:
    engines = opened(crew, mapped, "tp2-tp4")
    doomed = Worker("helpers.rank_worker:RankWorker", python_path=[str(TESTS)])
    successor = Worker("helpers.rank_worker:RankWorker", python_path=[str(TESTS)])
    try:
        rank = SHAPES["tp2-tp4"][0][1]
        first = engines.mint.offer(num_tokens=NUM_TOKENS)["sources"][0]
        lives = [{**worker.call("open", rank, name="source-1")} for worker in (doomed, successor)]
        kept = {"kvlink": 1, "groups": lives[0]["groups"], **first}
        for life, worker in zip(lives, (doomed, successor), strict=True):
            engines.mint, engines.sources[1] = kvlink.TicketMint([kept, life]), worker
            engines.prefill(seed=8)
            ticket = engines.mint.offer(num_tokens=NUM_TOKENS, readers=4)
            offers = engines.offer(ticket)
            outcomes(engines.pull(ticket))
            outcomes(offers)
            engines.verify(seed=8)
            if worker is doomed:
                ticket = engines.mint.offer(num_tokens=NUM_TOKENS, readers=4)
                offers = engines.offer(ticket)
                doomed.kill()
                for target, handle in engines.pull(ticket):
                    with pytest.raises((errors.PeerLost, errors.PeerUnreachable), match="source-1"):
                        target.call("wait", handle)
                    target.call("wait_until_released", handle)
                engines.sources[0].call("cancel", offers[0][1])
                engines.sources[0].call("wait_until_released", offers[0][1])
        engines.assert_nothing_held()
    finally:
        doomed.kill()
        successor.kill()
