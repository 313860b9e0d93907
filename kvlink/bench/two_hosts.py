"""`kvlink bench transfer` between two hosts: one serves blocks, the other connects, pulls and reports.

The connecting side asks a node of the serving side for what it needs, by the questions that nodes answer each
other: so only who has proved the secret is heard, at one known port. The blocks are offered by a second node
there, which has the geometry that was asked for, at a port of its own.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import kvlink
from kvlink.bench.scattered import Geometry, Pool
from kvlink.bench.source import BenchSource
from kvlink.bench.systems import DEADLINE_S, KvlinkSystem, Setting
from kvlink.errors import ConfigError, InvalidArgument, NotReady, PeerUnreachable
from kvlink.handoff.address import join_address, resolve, split_address

if TYPE_CHECKING:
    from kvlink.handoff.answer import Question

__all__ = ["BenchServer", "connect_to", "read_secret"]

_KIND = "bench transfer"
_MOST_TOTAL_BYTES = 16 << 30
_TICK_S = 1.0


def read_secret(path: str) -> str | None:
    """Return the secret in the file `path`, else that of ``KVLINK_SECRET``, else none.

    Raises
    ------
    ConfigError
        If the file cannot be read, or has no secret in it.
    """
    if not path:
        return os.environ.get("KVLINK_SECRET") or None
    try:
        secret = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--secret-file: {path} cannot be read: {getattr(error, 'strerror', error)}") from None
    if not secret:
        raise ConfigError(f"--secret-file: {path} is empty")
    return secret


class BenchServer:
    """The serving side: a node that answers questions, and the source that the last one asked for."""

    def __init__(self, address: str, *, secret: str | None, advertise: str | None) -> None:
        """Listen at `address`, ``host:port``.

        Raises
        ------
        ConfigError
            If it cannot be bound, others can reach it while there is no secret, or it is every interface and
            `advertise` does not name a host.
        """
        host = _split("--serve", address)[0]
        self._settings = {"listen": join_address(host, 0), "secret": secret, "advertise": advertise}
        pool = Pool(Geometry(block_bytes=128, total_bytes=256), memory="foreign")  # a node has a cache, also this one
        self._node = kvlink.Node(
            pool.cache(), name="bench-server", listen=address, secret=secret, advertise=advertise, copy_threads=1
        )
        self._lock = threading.Lock()
        self._source: BenchSource | None = None
        self._node._running.answerer.register(_KIND, self._answer)

    @property
    def address(self) -> str:
        """What others connect to."""
        return self._node.address

    def run(self) -> None:
        """Serve until the process is interrupted."""
        ended = threading.Event()
        while not ended.wait(timeout=_TICK_S):
            pass

    def close(self) -> None:
        """Stop serving."""
        self._node.close()
        with self._lock:
            self._forget()

    def _answer(self, question: Question) -> bytes:
        head, _, rest = question.body.partition(b"\n")
        try:
            request = json.loads(head)
            wanted = request["do"]
        except (ValueError, TypeError, KeyError):
            raise InvalidArgument(
                f"bench transfer: {question.name} asks what is not understood: same version?"
            ) from None
        with self._lock:
            if wanted == "open":
                return self._open(request)
            if self._source is None:
                raise NotReady(
                    "bench transfer: another host has taken the server over, or nothing was opened: start again"
                )
            if wanted == "offer":
                return json.dumps(self._source.offer(np.frombuffer(rest, dtype="<i4").astype(np.int32))).encode()
            if wanted == "finish":
                return json.dumps(self._source.finish(timeout_s=question.deadline.remaining_s)).encode()
            self._forget()
            return b"null"

    def _open(self, request: Any) -> bytes:
        self._forget()
        if request.get("version") != kvlink.__version__:
            raise InvalidArgument(
                f"bench transfer: this side has kvlink {kvlink.__version__}, the other {request.get('version')}"
            )
        geometry = Geometry(block_bytes=int(request["block_bytes"]), total_bytes=int(request["total_bytes"]))
        if geometry.total_bytes > _MOST_TOTAL_BYTES:
            raise InvalidArgument(
                f"bench transfer: {geometry.total_bytes} bytes asked for, at most {_MOST_TOTAL_BYTES}"
            )
        memory, threads = str(request["memory"]), int(request["threads"])
        self._source = BenchSource(geometry=geometry, memory=memory, threads=threads, **self._settings)
        return b"null"

    def _forget(self) -> None:
        if self._source is not None:
            self._source.close()
            self._source = None


def connect_to(address: str, *, secret: str | None) -> Callable[[Setting], KvlinkSystem]:
    """Return how to start a target here whose source is what serves at `address`.

    Raises
    ------
    ConfigError
        If `address` is not ``host:port``.
    PeerUnreachable
        If there is no way to it.
    """
    host, port = _split("--connect", address)
    return partial(_RemoteSystem, address=address, secret=secret, listen=join_address(_own_address(host, port), 0))


class _RemoteSource:
    """Obeys as a `BenchSource` of the host at `address`, asked by `node`."""

    def __init__(self, node: kvlink.Node, address: str) -> None:
        self._node = node
        self._address = address

    def call(self, method: str, *args: Any, timeout_s: float = DEADLINE_S) -> Any:
        body = b"".join(np.asarray(table, dtype="<i4").tobytes() for table in args)
        return self.ask({"do": method}, body, timeout_s=timeout_s)

    def ask(self, request: dict[str, Any], body: bytes = b"", *, timeout_s: float = DEADLINE_S) -> Any:
        question = json.dumps(request).encode() + b"\n" + body
        return json.loads(self._node._running.ask(self._address, _KIND, question, deadline_s=timeout_s))

    def kill(self) -> None:
        """Do nothing: the server forgets its source when the next one is asked for."""


class _RemoteSystem(KvlinkSystem):
    """A node here that pulls from one of another host."""

    def __init__(self, setting: Setting, *, address: str, secret: str | None, listen: str) -> None:
        self._prepare(setting, node={"listen": listen, "secret": secret})
        source = _RemoteSource(self._node, address)
        try:
            source.ask(
                {
                    "do": "open",
                    "version": kvlink.__version__,
                    "block_bytes": setting.geometry.block_bytes,
                    "total_bytes": setting.geometry.total_bytes,
                    "memory": setting.memory,
                    "threads": setting.threads,
                }
            )
        except BaseException:
            self._node.close()
            raise
        self._source = source


def _split(option: str, address: str) -> tuple[str, int]:
    try:
        return split_address(address, lowest_port=0 if option == "--serve" else 1)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None


def _own_address(host: str, port: int) -> str:
    """Return the address of this host by which that one is reached: what it must connect back to."""
    family, place = resolve((host, port))[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # nothing is sent
        try:
            probe.connect(place)
        except OSError as error:
            raise PeerUnreachable(f"bench transfer: there is no way to {host}: {error.strerror}") from None
        return str(probe.getsockname()[0])
