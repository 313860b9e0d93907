"""Decode workers in etcd, each under a lease of its own: who dies is gone once that has lapsed.

Written for an etcd that is away now and then. Whoever reads goes on with the last list, marked
stale; whoever is listed writes itself anew. One thread reads, and one a registration writes; each
tries one endpoint after the other, and waits longer after each failure.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from kvlink.directory.endpoints import Backoff, Certificates, EtcdConnection, EtcdFailed, parse_endpoints
from kvlink.directory.listing import Listing, Registration, Watchers, WorkerEntry
from kvlink.errors import ConfigError, KvlinkError

if TYPE_CHECKING:
    from etcd3gw.client import Etcd3Client
    from etcd3gw.lease import Lease

__all__ = ["EtcdDirectory", "parse_entry"]

_log = logging.getLogger("kvlink")

# etcd grants no shorter lease than one and a half election timeouts, which is 2 s as it comes.
_TTL_BOUNDS_S = (2.0, 3600.0)
_RENEWALS_A_LEASE = 3
# What changes more often than this is written together.
_WRITE_PAUSE_S = 0.05
# Nothing interrupts a read of the stream of changes: this is how soon a closing directory is noticed.
_WATCH_SLICE_S = 1.0
_CLOSE_S = 3.0
_MOST_ENTRY_BYTES = 64 << 10


class EtcdDirectory:
    """A directory in etcd. Thread-safe; needs the package ``etcd3gw`` (``kvlink[etcd]``).

    Parameters
    ----------
    endpoints
        ``host:port`` of each member, or ``https://host:port``.
    prefix
        What the keys begin with: schedulers and workers that are to find each other use the same.
    ttl_s
        How long a worker that has died stays listed; etcd counts it in whole seconds.
    ca_cert, client_cert
        Paths of PEM files for endpoints with TLS: who has signed etcd's certificate, and this side's
        own certificate and key.

    Raises
    ------
    ConfigError
        If an endpoint, `prefix` or `ttl_s` cannot be, or ``etcd3gw`` is not installed. That etcd
        cannot be reached is no error: it may come.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        prefix: str = "/kvlink/decode/",
        ttl_s: float = 5.0,
        ca_cert: str | None = None,
        client_cert: tuple[str, str] | None = None,
    ) -> None:
        if not _TTL_BOUNDS_S[0] <= ttl_s <= _TTL_BOUNDS_S[1]:
            raise ConfigError(f"etcd: ttl_s is {ttl_s!r}, outside [{_TTL_BOUNDS_S[0]:g}, {_TTL_BOUNDS_S[1]:g}]")
        if not prefix:
            raise ConfigError("etcd: prefix must not be empty")
        parsed = parse_endpoints(endpoints)
        certificates = Certificates(authority=ca_cert, own=client_cert)
        self._connect = partial(EtcdConnection, parsed, timeout_s=ttl_s / _RENEWALS_A_LEASE, certificates=certificates)
        self._prefix = prefix
        self._ttl_s = ttl_s
        self._lock = threading.Lock()
        self._reader: _Reader | None = None
        self._registrations: list[_EtcdRegistration] = []
        self._closed = False

    def listing(self) -> Listing:
        """Return what is known now: empty and stale until etcd has answered for the first time."""
        return self._reading().watchers.listing

    def watch(self, changed: Callable[[Listing], None]) -> Callable[[], None]:
        """Call `changed` with the present listing and with each new one; see ``Directory.watch``."""
        return self._reading().watchers.add(changed)

    def register(self, entry: Callable[[], WorkerEntry]) -> Registration:
        """List what `entry` returns, until that is closed or this process dies.

        `entry` is called again at each renewal of the lease, and after ``changed``. While it
        raises a ``KvlinkError``, as a suspended node does, nothing is listed.
        """
        registration = _EtcdRegistration(self._connect(), self._prefix, ttl_s=self._ttl_s, entry=entry)
        with self._lock:
            self._check_open()
            self._registrations.append(registration)
            registration.start()
        return registration

    def close(self) -> None:
        """Take out what is registered, and let go of connections and threads. Idempotent."""
        with self._lock:
            self._closed = True
            registrations, reader = list(self._registrations), self._reader
        for registration in registrations:
            registration.begin_closing()
        if reader is not None:
            reader.close()
        for registration in registrations:
            registration.close()

    def _reading(self) -> _Reader:
        with self._lock:
            if self._reader is None:
                self._check_open()
                self._reader = _Reader(self._connect(), self._prefix, timeout_s=self._ttl_s / _RENEWALS_A_LEASE)
            return self._reader

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("etcd: the directory is closed")


class _Reader:
    """The thread that keeps the listing as etcd has it."""

    def __init__(self, connection: EtcdConnection, prefix: str, *, timeout_s: float) -> None:
        self.watchers = Watchers(Listing(stale=True))
        self._connection = connection
        self._timeout_s = timeout_s
        self._range = {"key": _base64(prefix), "range_end": _base64(_after(prefix))}
        self._found: dict[str, tuple[int, WorkerEntry]] = {}  # by key, with the revision that made it
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvlink-directory", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(timeout=_CLOSE_S)

    def _run(self) -> None:
        backoff = Backoff()
        while not self._closing.is_set():
            try:
                revision = self._connection.call(self._list)
                backoff.reset()
                while not self._closing.is_set():
                    revision = self._connection.call(partial(self._follow, revision))
            except EtcdFailed as error:
                if not self.watchers.listing.stale:
                    _log.warning("directory: %s; going on with the last list until etcd is back", error)
                self._tell(stale=True)
                self._closing.wait(backoff.next_s())
        self._connection.close()

    def _list(self, client: Etcd3Client) -> int:
        """Read everything; return the revision at which it was so."""
        answer = client.post(client.get_url("/kv/range"), json=self._range)
        self._found = {}
        for pair in answer.get("kvs", []):
            self._put(pair)
        self._tell(stale=False)
        return int(answer["header"]["revision"])

    def _follow(self, revision: int, client: Etcd3Client) -> int:
        """Take the changes after `revision` for a while; return the revision from which to go on."""
        create = {**self._range, "start_revision": revision + 1}
        stream = client.session.post(
            client.get_url("/watch"),
            json={"create_request": create},
            stream=True,
            timeout=(self._timeout_s, _WATCH_SLICE_S),
        )
        with stream:
            for line in _lines_until_timeout(stream):
                revision = max(revision, self._take(json.loads(line)["result"]))
                if self._closing.is_set():
                    break
        return revision

    def _take(self, result: dict[str, Any]) -> int:
        """Make the changes that etcd tells; return the revision of the last one."""
        if result.get("canceled"):  # by a compaction, mostly: what was missed is in a new list
            raise EtcdFailed("the stream of changes was cancelled", answered=True)
        events = result.get("events", [])
        if not events:
            return 0
        for event in events:
            if event.get("type") == "DELETE":
                self._found.pop(event["kv"]["key"], None)
            else:
                self._put(event["kv"])
        self._tell(stale=False)
        return int(result["header"]["revision"])

    def _put(self, pair: dict[str, str]) -> None:
        key = pair["key"]
        try:
            self._found[key] = int(pair["create_revision"]), parse_entry(base64.b64decode(pair.get("value", "")))
        except ValueError as error:
            _log.warning("directory: what stands at %r is no decode worker: %s", base64.b64decode(key), error)
            self._found.pop(key, None)

    def _tell(self, *, stale: bool) -> None:
        newest: dict[str, tuple[int, WorkerEntry]] = {}
        for made, entry in self._found.values():
            # Of two lives at one address the earlier has died, though its lease lasts a while yet.
            if made >= newest.get(entry.address, (0, entry))[0]:
                newest[entry.address] = made, entry
        workers = {entry.epoch: entry for _, entry in newest.values()}
        self.watchers.tell(Listing(workers=MappingProxyType(workers), stale=stale))


def parse_entry(value: bytes) -> WorkerEntry:
    """Return the worker that somebody has listed with `value`.

    Raises
    ------
    ValueError
        If it is anything else.
    """
    if len(value) > _MOST_ENTRY_BYTES:
        raise ValueError(f"it has {len(value)} bytes")
    try:
        return msgspec.json.decode(value, type=WorkerEntry)
    except RecursionError as error:  # values inside values inside a field that is skipped
        raise ValueError(str(error)) from None


def _lines_until_timeout(stream: Any) -> Iterator[bytes]:
    """Yield what comes, and end when nothing has come for as long as a read may take."""
    from requests import exceptions
    from urllib3.exceptions import ReadTimeoutError

    try:
        yield from (line for line in stream.iter_lines(chunk_size=None) if line)
    except exceptions.ConnectionError as error:
        if not (error.args and isinstance(error.args[0], ReadTimeoutError)):
            raise


class _EtcdRegistration:
    """The thread that keeps one worker's entry in etcd, under a lease that it renews."""

    def __init__(
        self, connection: EtcdConnection, prefix: str, *, ttl_s: float, entry: Callable[[], WorkerEntry]
    ) -> None:
        self._connection = connection
        self._prefix = prefix
        self._ttl_s = ttl_s
        self._entry = entry
        self._lease_id: int | None = None
        self._renew_at = 0.0
        self._written: WorkerEntry | None = None
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvlink-register", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def changed(self) -> None:
        """Say that the entry is another now. Never waits."""
        self._wake.set()

    def begin_closing(self) -> None:
        """Have the entry taken out, without waiting for that."""
        self._closing.set()
        self._wake.set()

    def close(self) -> None:
        """Take the entry out. Idempotent; where etcd is away, its lease does that."""
        self.begin_closing()
        self._thread.join(timeout=_CLOSE_S)

    def _run(self) -> None:
        backoff = Backoff()
        is_away = False
        while not self._closing.is_set():
            try:
                pause_s = self._connection.call(self._write)
                backoff.reset()
                is_away = False
            except EtcdFailed as error:
                if error.answered:
                    self._lease_id = None  # which is what it complains of, if anything: the lease has lapsed
                if not is_away:
                    _log.warning("directory: %s; the entry of this worker is written once etcd is back", error)
                is_away = True
                pause_s = backoff.next_s()
            self._wake.wait(timeout=pause_s)
            self._wake.clear()
            self._closing.wait(_WRITE_PAUSE_S)
        with contextlib.suppress(EtcdFailed):
            self._connection.call(self._withdraw)
        self._connection.close()

    def _write(self, client: Etcd3Client) -> float:
        """Do what is due: a lease, its renewal, the entry. Return for how long nothing else is."""
        try:
            entry = self._entry()
        except KvlinkError as error:
            _log.info("directory: nothing to list now: %s", error)
            self._withdraw(client)
            return self._ttl_s / _RENEWALS_A_LEASE
        now = time.monotonic()
        if self._lease_id is not None and now >= self._renew_at:
            if self._lease(client).refresh() <= 0:
                self._lease_id = None  # lapsed, with the entry: as this process was stopped, or etcd was away
            self._renew_at = now + self._ttl_s / _RENEWALS_A_LEASE
        if self._lease_id is None:
            self._lease_id = client.lease(ttl=math.ceil(self._ttl_s)).id
            self._renew_at = now + self._ttl_s / _RENEWALS_A_LEASE
            self._written = None
        if entry != self._written:
            if self._written is not None and self._written.epoch != entry.epoch:
                client.delete(self._prefix + self._written.epoch)
            client.put(self._prefix + entry.epoch, msgspec.json.encode(entry), self._lease(client))
            self._written = entry
        return max(0.0, self._renew_at - time.monotonic())

    def _withdraw(self, client: Etcd3Client) -> None:
        if self._lease_id is not None:
            lease, self._lease_id = self._lease(client), None
            lease.revoke()

    def _lease(self, client: Etcd3Client) -> Lease:
        from etcd3gw.lease import Lease

        assert self._lease_id is not None
        return Lease(self._lease_id, client=client)


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _after(prefix: str) -> str:
    """Return the first key behind all those that begin with `prefix`."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)
