"""Nodes of different versions, and a fleet that changes its secret while it works."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from helpers import dialect_0
from helpers.markers import LANES
from helpers.patterns import Geometry, Placement, Request
from helpers.processes import Pair

import kvlink
from kvlink import errors, wire
from kvlink.testing import Worker

REQUEST = Request(source_blocks=(6, 1, 4), target_blocks=(0, 7, 3), num_tokens=11)


@pytest.fixture
def strangers(spawn: Callable[..., Worker]) -> Pair:
    """Two processes of the test's own, whose speech is changed for good; dialect 0 knows no hosts, hence TCP."""
    lane = LANES[4]
    return Pair(spawn(lane.env), spawn(lane.env), lane)


@pytest.mark.parametrize(
    ("source", "target"), [([0], [1, 0]), ([1, 0], [0]), ([0], [0])], ids=["older source", "older target", "both old"]
)
def test_the_older_dialect_is_really_spoken_where_one_node_knows_no_other(
    strangers: Pair, source: list[int], target: list[int]
) -> None:
    strangers.source.call("speak", source)
    strangers.target.call("speak", target)
    strangers.open()
    taken = strangers.hand_over(REQUEST)
    assert taken.lane == "staged"
    # Proof, target, and on the other side proof, source and welcome.
    assert strangers.target.call("spoken") == [2, 3]
    assert strangers.source.call("spoken") == [3, 2]


def test_the_newest_dialect_that_both_know_is_chosen(strangers: Pair) -> None:
    for worker in (strangers.source, strangers.target):
        worker.call("speak", [0, 1])
    strangers.open()
    strangers.hand_over(REQUEST)
    assert strangers.target.call("spoken") == strangers.source.call("spoken") == [0, 0]


@pytest.mark.parametrize("older", ["source", "target"])
def test_nodes_without_a_common_version_say_what_each_speaks_and_which_to_upgrade(strangers: Pair, older: str) -> None:
    getattr(strangers, older).call("speak", [0])
    strangers.open()
    _, ticket = strangers.offer(REQUEST)
    pulled = strangers.pull(ticket, REQUEST)
    acceptor, dialer = ([0], [1]) if older == "source" else ([1], [0])
    said = f"the acceptor speaks versions {acceptor} and the dialer {dialer}: upgrade the "
    said += "acceptor" if older == "source" else "dialer"
    with pytest.raises(errors.VersionMismatch) as caught:
        strangers.target.call("wait", pulled, timeout_s=10)
    assert said in str(caught.value)
    strangers.target.call("wait_released", pulled)


def test_a_refusal_is_said_in_the_dialect_that_was_chosen(strangers: Pair) -> None:
    strangers.source.call("speak", [0])
    strangers.target.call("speak", [1, 0])
    strangers.open()
    _, ticket = strangers.offer(REQUEST)
    strangers.source.call("ask", "suspend", deadline_s=0)
    pulled = strangers.pull(ticket, REQUEST)
    with pytest.raises(errors.NotReady, match="suspended"):
        strangers.target.call("wait", pulled)
    assert strangers.source.call("spoken")[0] == 2  # its proof and its refusal


def test_what_a_test_makes_a_process_speak_can_be_undone() -> None:
    undo = dialect_0.speak([0])
    assert wire.versions() == [0]
    undo()
    assert wire.versions() == [1]


def test_a_fleet_changes_its_secret_node_by_node_with_no_failed_handoff(spawn: Callable[..., Worker]) -> None:
    """Every node hands over to every other, over new connections, after each single step."""
    geometry, placement = Geometry(), Placement()
    fleet = [spawn() for _ in range(3)]
    for number, worker in enumerate(fleet):
        worker.call("open", geometry, placement, seed=number, name=f"node-{number}", secret="old")
    # One connection lives through it all: the last node keeps reading from the first.
    kept = itertools.count()

    def all_hand_over() -> None:
        for (at, source), (to, target) in itertools.permutations(enumerate(fleet), 2):
            if (at, to) != (0, 2):
                target.call("ask", "drop_peer", f"node-{at}")
            offered, ticket = source.call("offer", [1, 2], 8)
            target.call("wait", target.call("pull", ticket, [5, 6]))
            source.call("wait", offered)
            next(kept)

    all_hand_over()
    first = [peer["peer"] for peer in fleet[2].call("peers") if peer["name"] == "node-0" and peer["role"] == "source"]
    for step in (["old", "new"], ["new", "old"], ["new"]):
        for worker in fleet:
            worker.call("ask", "rotate_secret", step)
            all_hand_over()
    assert next(kept) == 60
    again = [peer["peer"] for peer in fleet[2].call("peers") if peer["name"] == "node-0" and peer["role"] == "source"]
    assert again == first  # the connection of before lives on

    stranger = spawn()
    stranger.call("open", geometry, placement, seed=9, name="late", secret="old")
    _, ticket = fleet[0].call("offer", [1], 4)
    with pytest.raises(errors.AuthenticationFailed):
        stranger.call("wait", stranger.call("pull", ticket, [5]))


@pytest.fixture
def node() -> Iterator[kvlink.Node]:
    tensor = np.zeros((2, 8, 4, 2, 8), dtype="float32")
    cache = kvlink.KVCache.from_tensors({"layers.0": tensor}, axes="kv block token head dim", block_tokens=4)
    with kvlink.Node(cache, name="n", copy_threads=1, secret="s") as made:
        yield made


@pytest.mark.parametrize("secret", [None, "", [], ["a", "b", "c"], 7])
def test_a_node_cannot_lose_its_secret(node: kvlink.Node, secret: object) -> None:
    with pytest.raises(errors.ConfigError, match="secret"):
        node.rotate_secret(secret)  # type: ignore[arg-type]
