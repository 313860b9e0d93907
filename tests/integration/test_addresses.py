"""Where nodes listen and what they tell others: free ports, other names, and IPv6."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest
from helpers.markers import LANES, Lane, skip_unless_served
from helpers.patterns import Request
from helpers.processes import Pair

from kvlink import errors
from kvlink.testing import Worker

REQUEST = Request(source_blocks=(6, 1, 4), target_blocks=(0, 7, 3), num_tokens=11)


@pytest.fixture(scope="module")
def ipv6() -> None:
    """Skip where the host has no IPv6."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError as error:
        pytest.skip(f"this host has no IPv6 loopback: {error}")


@pytest.mark.usefixtures("ipv6")
@pytest.mark.parametrize(
    "options",
    [
        {"listen": "[::1]:0"},
        {"listen": "[::]:0", "advertise": "[::1]", "secret": "s"},
        {"listen": "[::]:0", "advertise": "::1", "secret": "s"},
    ],
    ids=["loopback", "every interface", "without brackets"],
)
@pytest.mark.parametrize("lane", LANES, ids=lambda lane: lane.id)
def test_every_lane_works_between_nodes_that_know_only_ipv6(
    spawn: Callable[..., Worker], lane: Lane, options: dict[str, str]
) -> None:
    skip_unless_served(lane)
    if lane.lane == "get" and options["listen"] != "[::1]:0":
        lane = LANES[3]  # a node that may be reached by TCP offers no one-sided reads
    pair = Pair(spawn(lane.env), spawn(lane.env), lane)
    opened = pair.open(**options)
    host, _, port = opened["address"].rpartition(":")
    assert host == "[::1]"
    assert 0 < int(port) < 65536
    taken = pair.hand_over(REQUEST)
    assert taken.lane == lane.lane
    (seen,) = pair.source.call("peers")
    assert seen["address"].startswith("[::1]:")


@pytest.mark.usefixtures("ipv6")
def test_a_node_restarts_at_the_same_ipv6_address(spawn: Callable[..., Worker]) -> None:
    pair = Pair(spawn(), spawn(), LANES[0])
    address = pair.open(listen="[::1]:0")["address"]
    pair.hand_over(REQUEST)
    pair.source.kill()
    pair.source = spawn()
    pair.source.call("open", pair.geometry, pair.expected_source.placement, seed=2, listen=address)
    pair.hand_over(REQUEST)


def test_a_node_is_reached_by_the_name_that_it_advertises(spawn: Callable[..., Worker]) -> None:
    pair = Pair(spawn(), spawn(), LANES[0])
    opened = pair.open(listen="0.0.0.0:0", advertise="localhost", secret="s")
    assert opened["address"].startswith("localhost:")
    pair.hand_over(REQUEST)


def test_an_advertised_address_where_nobody_listens_is_unreachable(spawn: Callable[..., Worker]) -> None:
    pair = Pair(spawn(), spawn(), LANES[0])
    with socket.socket() as bound:  # and never listens; while it is open nobody else gets the port
        bound.bind(("127.0.0.1", 0))
        pair.open(advertise=f"127.0.0.1:{bound.getsockname()[1]}")
        pulled = pair.pull(pair.offer(REQUEST)[1], REQUEST, deadline_s=5)
        with pytest.raises(errors.PeerUnreachable):
            pair.target.call("wait", pulled)
