"""A pull that takes longer than the lease: its readers renew it, up to the cap."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from helpers.processes import wait_until

import kvlink
from kvlink import errors
from kvlink.testing.faults import FaultScript, inject_faults, remove_faults

TTL_S = 0.5
HEADS = 4


def node(name: str, heads: range, **options: object) -> kvlink.Node:
    tensors = {"a": np.zeros((2, 8, 4, len(heads), 8), dtype="float32")}
    cache = kvlink.KVCache.from_tensors(
        tensors, axes="kv block token head dim", block_tokens=4, heads=heads, total_kv_heads=HEADS
    )
    return kvlink.Node(cache, name=name, copy_threads=1, **options)  # type: ignore[arg-type]


class Ranks:
    """Two source ranks and a target. The second rank is late, so that the target holds on to what the first offers."""

    def __init__(self, lease_cap_s: float) -> None:
        limits = kvlink.Limits(lease_cap_s=lease_cap_s)
        self.sources = [node(f"rank-{r}", range(2 * r, 2 * r + 2), limits=limits) for r in range(2)]
        self.target = node("target", range(HEADS))
        mint = kvlink.TicketMint([source.descriptor for source in self.sources])
        self.ticket = mint.offer(num_tokens=7, ttl_s=TTL_S)
        self.first = self.sources[0].offer([1, 2], ticket=self.ticket)
        self.pull = self.target.pull(self.ticket, [3, 4], deadline_s=10)

    def close(self) -> None:
        for each in (*self.sources, self.target):
            each.close()


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    started = Ranks(request.param)
    yield started
    started.close()


@pytest.mark.parametrize("ranks", [60.0], indirect=True)
def test_a_lease_lasts_while_its_reader_reads(ranks: Ranks) -> None:
    assert not ranks.first.wait_released(timeout_s=3 * TTL_S)
    second = ranks.sources[1].offer([1, 2], ticket=ranks.ticket)
    ranks.pull.wait(timeout_s=5)
    for offer in (ranks.first, second):
        offer.wait(timeout_s=5)


@pytest.mark.parametrize("ranks", [2 * TTL_S], indirect=True)
def test_no_reader_keeps_an_offer_past_the_cap(ranks: Ranks) -> None:
    assert not ranks.first.wait_released(timeout_s=1.5 * TTL_S)
    with pytest.raises(errors.TicketExpired):
        ranks.first.wait(timeout_s=5)
    with pytest.raises(errors.TicketExpired):
        ranks.pull.wait(timeout_s=5)


@pytest.mark.parametrize("ranks", [60.0], indirect=True)
def test_a_lease_ends_when_its_reader_gives_up(ranks: Ranks) -> None:
    assert not ranks.first.wait_released(timeout_s=1.5 * TTL_S)
    ranks.pull.cancel()
    with pytest.raises(errors.TicketExpired):
        ranks.first.wait(timeout_s=5 * TTL_S)


@pytest.fixture
def two_nodes() -> Iterator[tuple[kvlink.Node, kvlink.Node]]:
    both = node("source", range(HEADS)), node("target", range(HEADS))
    yield both
    for each in both:
        each.close()


def give_up(target: kvlink.Node, ticket: dict[str, object]) -> None:
    """Claim the offer, be granted it, and go away without its bytes."""
    inject_faults(target, FaultScript(delay_ms=60_000.0))
    pull = target.pull(ticket, [3, 4], deadline_s=10)
    wait_until(lambda: pull.state == "moving", timeout_s=5, what=lambda: f"{pull} moves")
    pull.cancel()
    assert pull.wait_released(timeout_s=5)
    remove_faults(target)


def test_once_its_reader_is_gone_an_offer_waits_only_as_long_as_was_said(
    two_nodes: tuple[kvlink.Node, kvlink.Node],
) -> None:
    source, target = two_nodes
    offer = source.offer([1, 2], num_tokens=7, ttl_s=60, retry_s=TTL_S)
    assert not offer.wait_released(timeout_s=1.5 * TTL_S), "nobody has begun: the lease counts"

    give_up(target, offer.ticket)

    with pytest.raises(errors.TicketExpired):
        offer.wait(timeout_s=5 * TTL_S)


def test_another_attempt_within_that_time_is_served(two_nodes: tuple[kvlink.Node, kvlink.Node]) -> None:
    source, target = two_nodes
    offer = source.offer([1, 2], num_tokens=7, ttl_s=60, retry_s=5)
    give_up(target, offer.ticket)
    target.pull(offer.ticket, [3, 4], deadline_s=5).wait(timeout_s=5)
    offer.wait(timeout_s=5)


@pytest.mark.parametrize("retry_s", [0.0, -1.0, float("nan"), 1e9])
def test_a_time_for_another_attempt_that_is_out_of_bounds_is_named(
    two_nodes: tuple[kvlink.Node, kvlink.Node], retry_s: object
) -> None:
    with pytest.raises(errors.InvalidArgument, match="offer: retry_s"):
        two_nodes[0].offer([1, 2], num_tokens=7, retry_s=retry_s)  # type: ignore[arg-type]
    assert not any(two_nodes[0].holds().values())
