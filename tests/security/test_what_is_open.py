"""What a node opens to others: sockets on the address that it was told, and memory that is its user's alone."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from helpers.markers import Lane
from helpers.own_sockets import OwnMemory, OwnSocket
from helpers.patterns import Request
from helpers.processes import Pair, spawn_worker

REQUEST = Request(source_blocks=(6, 1, 4), target_blocks=(0, 7, 3), num_tokens=11)
LOOPBACK = {"ipv4": "127.0.0.1", "ipv6": "::1"}
LISTEN = {"ipv4": "127.0.0.1:0", "ipv6": "[::1]:0"}


@pytest.fixture(
    scope="module", params=["", "tcp", "all"], ids=["UCX as kvlink sets it", "UCX over TCP", "UCX with everything"]
)
def opened(request: pytest.FixtureRequest) -> Iterator[Pair]:
    env = {"UCX_TLS": request.param} if request.param else {}
    lane = Lane(id="staged", lane="staged", memory="pool", env=env)
    workers = [spawn_worker("helpers.own_sockets:OpenWorker", env) for _ in range(2)]
    yield Pair(workers[0], workers[1], lane)
    for worker in workers:
        worker.close()


def sockets_of_both(pair: Pair, **options: object) -> list[OwnSocket]:
    """All sockets once bytes have moved over UCX, and a push has called back."""
    pair.open(**options)
    pair.hand_over(REQUEST)
    pair.push_over(Request(source_blocks=(2, 5), target_blocks=(6, 1), num_tokens=8), ("commit", {}))
    found: list[OwnSocket] = pair.source.call("sockets") + pair.target.call("sockets")
    return found


@pytest.mark.parametrize("family", ["ipv4", "ipv6"])
def test_a_node_on_loopback_has_no_socket_on_any_other_address(opened: Pair, family: str) -> None:
    found = sockets_of_both(opened, listen=LISTEN[family], secret="s")
    network = [one for one in found if one.kind != "unix"]
    assert {one.kind for one in network} <= {"tcp", "tcp6"}
    assert {one.address for one in network} == {LOOPBACK[family]}
    listening = [one for one in network if one.is_listening]
    if not opened.lane.env:
        assert len(listening) == 2, "kvlink's own, of each of two nodes, and none of UCX's"
    assert {one.address for one in listening} == {LOOPBACK[family]}
    opened.shut()


def test_unix_sockets_are_in_no_folder_where_somebody_else_could_put_another(opened: Pair) -> None:
    named = [one.address for one in sockets_of_both(opened, secret="s") if one.kind == "unix" and one.address]
    assert named
    assert all(name.startswith("@") for name in named), named
    opened.shut()


def test_the_scan_sees_a_socket_on_every_address(opened: Pair) -> None:
    """What the tests above would miss if they could not fail."""
    found = sockets_of_both(opened, listen="0.0.0.0:0", advertise="127.0.0.1", secret="s")
    assert "0.0.0.0" in {one.address for one in found if one.is_listening}
    opened.shut()


def test_memory_that_others_could_open_is_its_users_alone(opened: Pair) -> None:
    opened.open(secret="s")
    opened.hand_over(REQUEST)
    found: list[OwnMemory] = opened.source.call("open_memory") + opened.target.call("open_memory")
    opened.shut()
    kinds = {one.name.split("_")[0].split(" ")[0] for one in found}
    assert "/memfd:kvlink" in kinds
    assert {one.owner for one in found} == {os.geteuid()}
    for one in found:
        # UCX makes its System V segments for the group too, which docs/security.md says.
        others = 0o007 if one.name.startswith("System V") else 0o077
        assert one.mode & others == 0, one
