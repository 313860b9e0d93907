"""A native engine that moves nothing: for tests of what stands around it.

Offers and pulls end when the test says so. Two fakes that were attached to each other settle a
pull of a live offer at once, so that connecting can be tested from end to end.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from typing import Any

from kvlink.errors import Closed, KvlinkError, error_class


class FakeHandoff:
    """One side of a handoff, settled by whoever holds it."""

    def __init__(self, engine: FakeEngine, *, kind: str, epoch: bytes, sequence: int, label: str, payload: bytes):
        self.engine = engine
        self.kind = kind
        self.epoch = epoch
        self.sequence = sequence
        self.attempt = 1
        self.label = label
        self.payload = payload
        self.state = "offered" if kind == "offer" else "connecting"
        self.outcome: str | None = None
        self.released = False
        self.error: tuple[str, str] | None = None
        self.failed: list[Any] = []
        self.valid_prefix_tokens = 0
        self.bytes = 0
        self.lane = ""
        self.phases_s: dict[str, float] = {}
        self.cancelled = 0
        self._changed = threading.Condition()

    def settle(self, code: str | None = None, message: str = "", *, released: bool = True) -> None:
        with self._changed:
            if self.outcome is None:
                self.outcome = "failed" if code else "succeeded"
                self.state = self.outcome
                self.error = (code, message) if code else None
            self.released = self.released or released
            self._changed.notify_all()
        self.engine.ring()

    def cancel(self) -> None:
        self.cancelled += 1
        self.settle("Cancelled", "cancelled by its owner")

    def wait(self, *, timeout_s: float) -> bool:
        return self._wait(lambda: self.outcome is not None, timeout_s)

    def wait_released(self, *, timeout_s: float) -> bool:
        return self._wait(lambda: self.released, timeout_s)

    def _wait(self, happened: Any, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(happened, timeout_s)


class FakeEngine:
    """What ``kvlink._native.Engine`` is to Python, without a thread or a byte moved."""

    by_epoch: dict[bytes, FakeEngine] = {}

    def __init__(self, *, epoch: bytes) -> None:
        self.epoch = epoch
        self.offers: dict[int, FakeHandoff] = {}
        self.pulls: list[FakeHandoff] = []
        self.sources: dict[int, dict[str, Any]] = {}
        self.claimants: list[dict[str, Any]] = []
        self.failures: dict[int, tuple[str, str]] = {}
        self.states: dict[int, str] = {}
        self.addresses: dict[int, str] = {}
        self.attached = threading.Event()
        self.failed = threading.Event()
        self.closed = False
        self.refusing: KvlinkError | None = None
        self._waiting: list[tuple[FakeHandoff, list[int]]] = []  # pulls, and the peers that they read from
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()
        self._bells = os.eventfd(0, os.EFD_NONBLOCK), os.eventfd(0, os.EFD_NONBLOCK)
        FakeEngine.by_epoch[epoch] = self

    def refuse_new(self, *, code: str, message: str) -> None:
        self.refusing = error_class(code)(message)

    def accept_new(self) -> None:
        self.refusing = None

    def close(self, *, deadline_s: float, code: str = "Closed", message: str = "the node was closed") -> None:
        with self._lock:
            if self.closed:
                return
            self.closed = True
            live = [*self.offers.values(), *self.pulls]
        for handoff in live:
            handoff.settle(code, message)
        for attached in [*self.sources.values(), *self.claimants]:
            for fd in (attached["fd"], *attached.get("region_fds", ())):
                if fd >= 0:
                    os.close(fd)
        for bell in self._bells:
            os.close(bell)

    def ring(self) -> None:
        with self._lock:  # the bells are closed once `closed` is true
            if not self.closed:
                for bell in self._bells:
                    os.eventfd_write(bell, 1)

    def fileno(self) -> int:
        return self._bells[0]

    def wake_fd(self) -> int:
        return self._bells[1]

    def ucx_address(self) -> bytes:
        return b""

    def pack_keys(self) -> list[bytes]:
        return []

    def expect_peer(self, *, address: str) -> int:
        self._check()
        peer = next(self._numbers)
        self.states[peer] = "connecting"
        self.addresses[peer] = address
        return peer

    def attach_source(self, peer: int, **facts: Any) -> list[str]:
        with self._lock:
            self.sources[peer] = facts
            if self.states[peer] == "connecting":
                self.states[peer] = "ready"
        self._serve_ready()
        self.attached.set()
        return list(facts["lanes"])

    def attach_claimant(self, **facts: Any) -> int:
        self.claimants.append(facts)
        self.attached.set()
        return next(self._numbers)

    def fail_peer(self, peer: int, *, code: str, message: str) -> None:
        self._check()
        with self._lock:
            self.failures[peer] = (code, message)
            self.states[peer] = "lost"
            failed = [pull for pull, peers in self._waiting if peer in peers]
        for pull in failed:  # the first failure of a pull counts
            pull.settle(code, message)
        self.failed.set()

    def is_peer_lost(self, peer: int) -> bool:
        return self.states[peer] == "lost"

    def peers(self) -> list[dict[str, Any]]:
        return [
            {
                "peer": peer,
                "name": self.sources.get(peer, {}).get("name", ""),
                "address": self.addresses[peer],
                "epoch": self.sources.get(peer, {}).get("epoch", bytes(16)),
                "state": state,
            }
            for peer, state in self.states.items()
        ]

    def offer(self, *, label: str, payload: bytes, minted: tuple[bytes, int] | None = None, **_: Any) -> FakeHandoff:
        self._check()
        epoch, sequence = minted or (self.epoch, next(self._numbers))
        offered = FakeHandoff(self, kind="offer", epoch=epoch, sequence=sequence, label=label, payload=payload)
        self.offers[sequence] = offered
        return offered

    def pull(self, sources: list[tuple[int, bytes, int]], *, label: str, deadline_ms: int, **_: Any) -> FakeHandoff:
        self._check()
        peers = [peer for peer, _, _ in sources]
        _, epoch, sequence = sources[0]
        pull = FakeHandoff(self, kind="pull", epoch=epoch, sequence=sequence, label=label, payload=b"")
        self.pulls.append(pull)
        with self._lock:
            lost = next((peer for peer in peers if self.states[peer] == "lost"), None)
            self._waiting.append((pull, peers))
        if lost is not None:
            pull.settle(*self.failures.get(lost, ("PeerLost", "the connection is gone")))
        self._serve_ready()
        return pull

    def holds(self) -> dict[str, int]:
        return {"shared": 0, "exclusive": 0, "quarantined": 0, "handoffs": 0}

    def counters(self) -> dict[str, int]:
        return {"offers": len(self.offers), "pulls": len(self.pulls)}

    def _check(self) -> None:
        if self.closed:
            raise Closed("the engine is closed")
        if self.refusing is not None:
            raise self.refusing

    def _serve_ready(self) -> None:
        with self._lock:
            ready = [
                (pull, peers) for pull, peers in self._waiting if all(self.states[peer] == "ready" for peer in peers)
            ]
            self._waiting = [one for one in self._waiting if one not in ready and one[0].outcome is None]
        for pull, peers in ready:
            self._serve(pull, peers)

    def _serve(self, pull: FakeHandoff, peers: list[int]) -> None:
        if pull.outcome is not None:
            return
        offers = [FakeEngine.by_epoch[self.sources[peer]["epoch"]].offers.get(pull.sequence) for peer in peers]
        if any(offered is None or offered.outcome is not None for offered in offers):
            pull.settle("UnknownHandoff", "no such offer")
            return
        pull.payload, pull.lane = offers[0].payload, "mapped"
        for offered in offers:
            offered.settle()
        pull.settle()  # last, since the test may end with it


def wait_until(happened: Any, *, timeout_s: float = 5.0) -> None:
    """Look until it is so; for what has no event of its own."""
    until = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < until, "it did not happen in time"
        threading.Event().wait(0.005)
