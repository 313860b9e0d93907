"""Peers that never answer, answer garbage, or hang up; and strangers that knock at a node."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.patterns import Request
from helpers.processes import Pair

from kvlink import errors
from kvlink.handoff.ticket import TicketSource, make_ticket
from kvlink.testing import Worker

REQUEST = Request(source_blocks=(6, 1, 4), target_blocks=(0, 7, 3), num_tokens=11)
DEADLINE_S = 1.0


@pytest.fixture
def server() -> Iterator[Callable[[Callable[[socket.socket], None]], str]]:
    """Listen with a function that answers each connection."""
    listeners: list[socket.socket] = []

    def serve(answer: Callable[[socket.socket], None]) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                listeners.append(connection)
                try:
                    answer(connection)
                except OSError:
                    connection.close()

        threading.Thread(target=accept, daemon=True).start()
        return f"127.0.0.1:{listener.getsockname()[1]}"

    yield serve
    for listener in listeners:
        listener.close()


def forged(address: str, *, epoch: bytes = bytes(range(16)), name: str = "nobody", **changes: Any) -> dict[str, Any]:
    """A well-formed ticket that no node ever gave."""
    sources = [TicketSource(name=name, address=address, epoch=epoch.hex())]
    fields = {"epoch": epoch, "sequence": 1, "num_tokens": 11, "groups": ["full"], "readers": 1, "ttl_ms": 30_000}
    return make_ticket(**{**fields, "sources": sources, **changes})


def refuse(pair: Pair, ticket: dict[str, Any], *kinds: type[Exception]) -> None:
    began = time.monotonic()
    pulled = pair.pull(ticket, REQUEST, deadline_s=DEADLINE_S)
    with pytest.raises(kinds):
        pair.target.call("wait", pulled, timeout_s=2 * DEADLINE_S)
    assert time.monotonic() - began < DEADLINE_S + 0.5
    said = pair.target.call("wait_released", pulled, timeout_s=1)
    assert said.error in [kind.__name__ for kind in kinds]  # the handoff's own outcome, not only the wait's
    assert not any(pair.target.call("holds").values())
    pair.verify_target()


def test_a_peer_that_accepts_and_never_answers(opened: Pair, server: Any) -> None:
    refuse(opened, forged(server(lambda connection: None)), errors.DeadlineExceeded, errors.PeerUnreachable)


def test_a_peer_that_hangs_up_at_once(opened: Pair, server: Any) -> None:
    refuse(opened, forged(server(lambda connection: connection.close())), errors.PeerUnreachable, errors.PeerLost)


def test_a_peer_that_resets_the_connection(opened: Pair, server: Any) -> None:
    def reset(connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        connection.close()

    refuse(opened, forged(server(reset)), errors.PeerUnreachable, errors.PeerLost)


@pytest.mark.parametrize(
    "noise",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\xff" * 64, b"\0" * 64, b"\x05\0\0\0hello", b"\x04\0\0\0\xc1\xc1\xc1\xc1"],
    ids=["http", "ones", "zeros", "text", "no-msgpack"],
)
def test_a_peer_that_speaks_something_else(opened: Pair, server: Any, noise: bytes) -> None:
    kinds = (errors.ProtocolError, errors.PeerUnreachable, errors.PeerLost, errors.VersionMismatch)
    refuse(opened, forged(server(lambda connection: connection.sendall(noise))), *kinds, errors.DeadlineExceeded)


def test_a_port_where_nobody_listens(opened: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    refuse(opened, forged(address), errors.PeerUnreachable)


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({"sequence": 10**6}, (errors.UnknownHandoff, errors.DeadlineExceeded)),
        ({"epoch": bytes(16)}, (errors.StalePeer,)),
        ({"num_tokens": 13}, (errors.NotOffered, errors.InvalidArgument)),
        ({"groups": ["sliding"]}, (errors.NotOffered,)),
    ],
    ids=["unknown", "other-epoch", "more-tokens", "other-groups"],
)
def test_a_ticket_forged_with_a_right_check_grants_nothing(opened: Pair, changes: Any, kinds: Any) -> None:
    _, real = opened.offer(REQUEST)
    (source,) = real["sources"]
    epoch, _, sequence = real["id"].partition("-")
    same = {"epoch": bytes.fromhex(epoch), "sequence": int(sequence), "name": source["name"]}
    larger = Request(source_blocks=(), target_blocks=(0, 7, 3, 5), num_tokens=13)
    ticket = forged(source["address"], **{**same, **changes})
    with pytest.raises(kinds):
        opened.target.call("wait", opened.pull(ticket, larger, deadline_s=DEADLINE_S))
    opened.verify()


@pytest.mark.parametrize(
    "knock",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff",
        b"\x10\0\0\0half",
        b"\x04\0\0\0\xc1\xc1\xc1\xc1",
        b"\0" * 65536,
    ],
    ids=["silence", "http", "huge", "half", "no-msgpack", "zeros"],
)
def test_strangers_at_the_door_hold_up_nobody(opened: Pair, knock: bytes) -> None:
    address = opened.source.call("address")
    host, port = address.rsplit(":", 1)
    strangers = [socket.create_connection((host, int(port)), timeout=5) for _ in range(200)]
    try:
        for stranger in strangers:
            stranger.sendall(knock)
        opened.hand_over(REQUEST)
        assert opened.source.call("peers") != []
    finally:
        for stranger in strangers:
            stranger.close()
    opened.hand_over(REQUEST)


def test_a_stopped_peer_that_was_never_connected_exceeds_the_deadline(
    opened: Pair, spawn: Callable[..., Worker]
) -> None:
    stopped = spawn()
    stopped.call("open", opened.geometry, opened.expected_source.placement, seed=5)
    _, ticket = stopped.call("offer", [6, 1, 4], 11)
    stopped.pause()
    refuse(opened, ticket, errors.DeadlineExceeded, errors.PeerUnreachable)
    stopped.resume()
    opened.target.call("wait", opened.pull(ticket, REQUEST, deadline_s=10))


def test_a_stopped_peer_that_is_connected_exceeds_the_deadline(opened: Pair) -> None:
    opened.hand_over(REQUEST)
    offered, ticket = opened.offer(REQUEST, ttl_s=20)
    opened.source.pause()
    try:
        refuse(opened, ticket, errors.DeadlineExceeded)
    finally:
        opened.source.resume()
    opened.source.call("cancel", offered)
    opened.source.call("wait_released", offered)
    opened.hand_over(REQUEST)
