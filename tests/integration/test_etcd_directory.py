"""Decode workers in a real etcd: who dies disappears, and an etcd that is away loses nothing."""

from __future__ import annotations

import base64
import json
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.etcd_server import EtcdServer, needs_etcd
from helpers.processes import spawn_worker
from unit.test_directory import entry

from kvlink import errors
from kvlink.directory import EtcdDirectory, Listing, WorkerEntry

pytestmark = needs_etcd

TTL_S = 2.0
#: etcd looks for lapsed leases twice a second, and grants them a whole second more on a new leader.
GONE_S = TTL_S + 4


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """One for all tests of this file, each with keys of its own."""
    found = EtcdServer(tmp_path_factory.mktemp("etcd"))
    found.start()
    yield found
    found.kill()


class Seen:
    """What a directory has told, and a way to wait for it."""

    def __init__(self, directory: EtcdDirectory) -> None:
        self._changed = threading.Condition()
        self.listing = Listing(stale=True)
        self.history: list[Listing] = []
        directory.watch(self._hear)

    def _hear(self, listing: Listing) -> None:
        with self._changed:
            self.listing = listing
            self.history.append(listing)
            self._changed.notify_all()

    def until(self, happened: Callable[[Listing], bool], *, timeout_s: float = 10) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: happened(self.listing), timeout_s), self.listing

    def names(self) -> list[str]:
        return sorted(one.name for one in self.listing.workers.values())


def lists(*names: str, stale: bool = False) -> Callable[[Listing], bool]:
    return lambda listing: (
        sorted(one.name for one in listing.workers.values()) == sorted(names) and listing.stale == stale
    )


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return f"/{request.node.name}/"


@pytest.fixture
def open_directory(server: EtcdServer, prefix: str) -> Iterator[Callable[..., EtcdDirectory]]:
    opened: list[EtcdDirectory] = []

    def make(prefix: str = prefix) -> EtcdDirectory:
        opened.append(EtcdDirectory([server.endpoint], ttl_s=TTL_S, prefix=prefix))
        return opened[-1]

    yield make
    # Together, since each waits for a thread that looks up once a second.
    closing = [threading.Thread(target=directory.close) for directory in opened]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join(timeout=10)
        assert not thread.is_alive()


def call(server: EtcdServer, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(f"http://{server.endpoint}/v3/{path}", json.dumps(body).encode())
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=5) as answer:
        return json.load(answer)


class Listed:
    """Runs in a process of its own: a worker that registers, and then only lives."""

    def register(self, endpoint: str, prefix: str, number: int) -> None:
        self._directory = EtcdDirectory([endpoint], ttl_s=TTL_S, prefix=prefix)
        self._registration = self._directory.register(lambda: entry(number))


def test_a_worker_is_listed_until_it_leaves_and_changes_are_told(open_directory: Callable[..., EtcdDirectory]) -> None:
    seen = Seen(open_directory())
    now = entry(1)
    registration = open_directory().register(lambda: now)
    seen.until(lists("decode-1"))
    now = entry(1, free=2, load=6)
    registration.changed()
    seen.until(lambda listing: listing.workers.get(now.epoch) == now)
    now = entry(2)  # its node was suspended and resumed: another epoch
    registration.changed()
    seen.until(lists("decode-2"))
    registration.close()
    seen.until(lists())


def test_a_worker_that_dies_disappears_within_its_lease(
    server: EtcdServer, prefix: str, open_directory: Callable[..., EtcdDirectory]
) -> None:
    seen = Seen(open_directory())
    with spawn_worker("integration.test_etcd_directory:Listed") as worker:
        worker.call("register", server.endpoint, prefix, 7)
        stays = open_directory().register(lambda: entry(1))
        seen.until(lists("decode-1", "decode-7"))
        worker.kill()
        killed = time.monotonic()
    seen.until(lists("decode-1"), timeout_s=GONE_S)
    assert time.monotonic() - killed < GONE_S
    stays.close()


@pytest.mark.expects_warnings
def test_an_etcd_that_is_killed_and_started_again_loses_nothing(
    server: EtcdServer, open_directory: Callable[..., EtcdDirectory]
) -> None:
    """What was listed stays, marked stale; workers write themselves anew; changes meanwhile are seen afterwards."""
    seen = Seen(open_directory())
    now = entry(1)
    registration = open_directory().register(lambda: now)
    seen.until(lists("decode-1"))

    server.kill()
    seen.until(lists("decode-1", stale=True))
    now = entry(1, free=1)
    registration.changed()
    time.sleep(TTL_S / 2)  # nothing can be seen to happen
    assert seen.names() == ["decode-1"]

    server.start()
    seen.until(lambda listing: not listing.stale and listing.workers.get(now.epoch) == now)
    assert all(listing.workers for listing in seen.history[2:]), "it was gone in between"


def test_a_worker_that_loses_its_lease_comes_back(
    server: EtcdServer, prefix: str, open_directory: Callable[..., EtcdDirectory]
) -> None:
    seen = Seen(open_directory())
    open_directory().register(lambda: entry(1))
    seen.until(lists("decode-1"))
    key = base64.b64encode((prefix + entry(1).epoch).encode()).decode()
    call(server, "lease/revoke", {"ID": call(server, "kv/range", {"key": key})["kvs"][0]["lease"]})
    seen.until(lists())
    seen.until(lists("decode-1"), timeout_s=TTL_S + 2)


def test_a_node_that_has_nothing_to_list_is_not_listed(open_directory: Callable[..., EtcdDirectory]) -> None:
    seen = Seen(open_directory())
    ready = True

    def present() -> WorkerEntry:
        if not ready:
            raise errors.NotReady("suspended")
        return entry(1)

    registration = open_directory().register(present)
    seen.until(lists("decode-1"))
    ready = False
    registration.changed()
    seen.until(lists())
    ready = True
    registration.changed()
    seen.until(lists("decode-1"))


@pytest.mark.expects_warnings
def test_what_others_wrote_there_is_skipped_and_an_earlier_life_gives_way(
    server: EtcdServer, prefix: str, open_directory: Callable[..., EtcdDirectory]
) -> None:
    seen = Seen(open_directory())
    put = {"key": base64.b64encode(f"{prefix}x".encode()).decode(), "value": base64.b64encode(b"{}").decode()}
    call(server, "kv/put", put)
    first, second = entry(1, address="127.0.0.1:9"), entry(2, address="127.0.0.1:9")
    open_directory().register(lambda: first)
    seen.until(lists("decode-1"))
    open_directory().register(lambda: second)
    seen.until(lists("decode-2"))
    open_directory(prefix=f"{prefix[:-1]}-elsewhere/").register(lambda: entry(3))
    other = Seen(open_directory(prefix=f"{prefix[:-1]}-elsewhere/"))
    other.until(lists("decode-3"))
    assert seen.names() == ["decode-2"]


@pytest.mark.expects_warnings
def test_an_etcd_that_answers_nothing_makes_the_list_stale_and_nobody_waits_for_it(
    server: EtcdServer, open_directory: Callable[..., EtcdDirectory]
) -> None:
    directory = open_directory()
    seen = Seen(directory)
    registration = directory.register(lambda: entry(1))
    seen.until(lists("decode-1"))
    server.pause()
    try:
        seen.until(lists("decode-1", stale=True))
        started = time.monotonic()
        registration.changed()
        assert directory.listing().stale
        assert time.monotonic() - started < 0.1
    finally:
        server.go_on()
    seen.until(lists("decode-1"))
