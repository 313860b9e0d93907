"""Handoffs and pushes between two hosts: where the bytes go, and over which addresses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.markers import Lane
from helpers.patterns import Request
from helpers.two_hosts import INTERFACE, Host, HostPair, networked

REQUEST = Request(source_blocks=(6, 1, 4), target_blocks=(0, 7, 3), num_tokens=11)
ANOTHER = Request(source_blocks=(2, 5), target_blocks=(6, 1), num_tokens=8)


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    with networked(2) as network:
        yield network.hosts


@pytest.fixture(scope="module")
def reused(hosts: list[Host]) -> Iterator[HostPair]:
    pair = HostPair(hosts)
    yield pair
    pair.end()


@pytest.fixture
def between(reused: HostPair) -> Iterator[HostPair]:
    yield reused
    reused.shut()


def used_transports(pair: HostPair) -> str:
    (seen,) = pair.source.call("peers")
    return str(seen["transports"])


def sockets_of_both(pair: HostPair) -> list[list[str]]:
    workers = (pair.source, pair.target)
    return [host.sockets(pid=worker.pid) for host, worker in zip(pair.hosts, workers, strict=True)]


@pytest.mark.parametrize("family", ["ipv4", "ipv6"])
def test_pull_and_push_use_only_the_interface_that_the_node_listens_on(between: HostPair, family: str) -> None:
    between.open_on(family)
    taken = between.hand_over(REQUEST)
    assert taken.lane == "staged"
    assert used_transports(between) == f"tcp/{INTERFACE}"
    between.push_over(ANOTHER, ("commit", {}))
    assert sockets_of_both(between) == [[getattr(host, family)] for host in between.hosts]


def test_a_node_that_listens_everywhere_moves_bytes_over_the_interface_that_it_advertises(between: HostPair) -> None:
    source, target = between.hosts
    everywhere = {"listen": "0.0.0.0:0", "secret": "s"}
    opened = between.open(**everywhere, advertise=source.ipv4, target_options={**everywhere, "advertise": target.ipv4})
    assert opened["address"].startswith(source.ipv4)
    between.hand_over(REQUEST)
    assert used_transports(between) == f"tcp/{INTERFACE}"
    assert sockets_of_both(between) == [sorted(["0.0.0.0", host.ipv4]) for host in between.hosts]


def test_network_namespaces_of_one_kernel_hand_over_as_two_hosts_do() -> None:
    """The names of the sockets that the lanes of one host need are not known in another namespace."""
    lane = Lane(id="auto", lane="staged", memory="pool")
    with networked(2, same_machine=True) as network:
        pair = HostPair(network.hosts, lane)
        try:
            pair.open_on("ipv4")
            offered, ticket = pair.offer(REQUEST)
            pulled = pair.pull(ticket, REQUEST, require=None)
            assert pair.target.call("wait", pulled).lane == "staged"
            pair.expect(REQUEST)
            pair.source.call("wait", offered)
            pair.verify()
            (seen,) = pair.target.call("peers")
            assert "network namespace" in seen["lane_reason"]
        finally:
            pair.end()
