"""Cables pulled in the middle of a transfer, and hosts that vanish: an outcome by the deadline, nothing held."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.patterns import Geometry, Placement, Request
from helpers.soak import rounds
from helpers.two_hosts import HostPair, Network, networked

from kvlink import errors

#: 64 blocks of 256 KiB take a second over a link of this speed.
GEOMETRY = Geometry(layers=("layers.0",), heads=8, head_dim=1024)
PLACEMENT = Placement(num_blocks=64)
LARGE = Request(source_blocks=tuple(range(64)), target_blocks=tuple(reversed(range(64))), num_tokens=64 * 4)
SMALL = Request(source_blocks=(5,), target_blocks=(9,), num_tokens=4)
LINK_MBIT = 100
OUT_S = float(rounds(1, 3))


@pytest.fixture
def network() -> Iterator[Network]:
    with networked(2) as found:
        yield found


@pytest.fixture
def between(network: Network) -> Iterator[HostPair]:
    for host in network.hosts:
        network.shape(host, mbit=LINK_MBIT)
    pair = HostPair(network.hosts)
    yield pair
    pair.end()


def moving(pair: HostPair, *, ttl_s: float, deadline_s: float) -> tuple[int, int, dict[str, Any]]:
    """Start a handoff and return once its bytes move, or would if UCX were connected."""
    offered, ticket = pair.offer(LARGE, ttl_s=ttl_s)
    pulled = pair.pull(ticket, LARGE, deadline_s=deadline_s)
    pair.target.call("watch_moving", pulled)
    return offered, pulled, ticket


@pytest.mark.parametrize("family", ["ipv4", "ipv6"][: rounds(1, 2)])
@pytest.mark.parametrize("end", ["target", "source"][: rounds(1, 2)])
@pytest.mark.parametrize(("ttl_s", "resumes"), [(30.0, True), (4.0, False)][: rounds(1, 2)])
def test_a_cable_pulled_for_seconds(
    network: Network, between: HostPair, family: str, end: str, ttl_s: float, resumes: bool
) -> None:
    between.open_on(family, geometry=GEOMETRY, source=PLACEMENT, target=PLACEMENT)
    host = network.hosts[0 if end == "source" else 1]
    offered, pulled, ticket = moving(between, ttl_s=ttl_s, deadline_s=20)
    network.pull_cable(host)
    with pytest.raises((errors.DeadlineExceeded, errors.PeerLost), match="no outcome within|UCX endpoint"):
        between.target.call("tell", pulled, ("wait", {"timeout_s": OUT_S}))
    network.put_cable(host)
    try:
        try:
            between.target.call("wait", pulled)
        except errors.PeerLost:  # UCX was just connecting and found no way, and the source has said so: once more
            between.target.call("wait_released", pulled)
            pulled = between.pull(ticket, LARGE, deadline_s=20)
            between.target.call("wait", pulled)
    except errors.TicketExpired:
        assert not resumes
    else:  # also where a renewal got through in time
        between.expect(LARGE)
        between.verify()
    between.target.call("wait_released", pulled)
    between.source.call("wait_released", offered)
    assert not any(between.holds())
    between.open_on(family, geometry=GEOMETRY, source=PLACEMENT, target=PLACEMENT)
    between.hand_over(LARGE)


@pytest.mark.parametrize("met", [True, False], ids=["in the middle", "before UCX is connected"])
def test_a_host_that_vanishes_leaves_an_outcome_by_the_deadline(network: Network, between: HostPair, met: bool) -> None:
    between.open_on("ipv4", geometry=GEOMETRY, source=PLACEMENT, target=PLACEMENT)
    if met:
        between.hand_over(SMALL)
    started = time.monotonic()
    offered, pulled, _ = moving(between, ttl_s=3, deadline_s=2)
    network.lose(network.hosts[1])
    with pytest.raises((errors.DeadlineExceeded, errors.PeerLost)):
        between.target.call("wait", pulled)
    assert time.monotonic() - started < 3
    with pytest.raises((errors.TicketExpired, errors.PeerLost)):
        between.source.call("wait", offered)
    assert time.monotonic() - started < 5
    between.target.call("wait_released", pulled)
    between.source.call("wait_released", offered)
    assert not any(between.holds())
    between.shut()
