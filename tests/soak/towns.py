"""Who takes part in the soak: members around one another, on one host, on TCP alone, or on two hosts with a cable."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from helpers.markers import ptrace_refusal
from helpers.processes import spawn_worker
from helpers.two_hosts import Host, Network, networked

from kvlink.testing import Worker
from soak.memory import Shape

#: Below the ports that the kernel gives out, so that nobody has one while its member is dead.
_PORTS = range(15_000, 30_000)


@dataclass(kw_only=True)
class Resident:
    """One member's place: what it is, where it listens, and its process of the moment. An elder is never killed."""

    name: str
    town: str
    shape: Shape
    lanes: tuple[str | None, ...]
    elder: bool = False
    env: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)
    host: Host | None = None
    listen: str = ""
    worker: Worker | None = None
    usages: list[dict[str, int]] = field(default_factory=list)
    mapped: list[Counter[str]] = field(default_factory=list)
    stopped_until: int | None = None

    def start(self, birth: int, secrets: list[str]) -> None:
        """Start a process at its address, as the one before was or anew."""
        if self.host is None:
            self.worker = spawn_worker("soak.member:Member", self.env)
        else:
            host = {"namespace": self.host.namespace, "boot_id": self.host.boot_id}
            self.worker = spawn_worker("soak.member:enter_host", self.env, **host)
        self.usages, self.mapped, self.stopped_until = [], [], None
        self.call(
            "open", self.name, self.shape, birth=birth, limits=self.limits, listen=self.listen, secret=secrets,
            **self.options,
        )  # fmt: skip

    def call(self, method: str, *args: Any, timeout_s: float = 60.0, **options: Any) -> Any:
        """Call a method of the member."""
        assert self.worker is not None
        return self.worker.call(method, *args, timeout_s=timeout_s, **options)


def free_port() -> int:
    """One that nobody listens on."""
    for port in random.sample(_PORTS, 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")


def residents(network: Network | None) -> list[Resident]:
    """All members: unlike layouts, kinds of memory, lanes, checksums and windows."""
    one_host: tuple[str | None, ...] = ("mapped", "get", "staged", "staged", None)
    foreign: tuple[str | None, ...] = ("get", "staged", None)
    if not ptrace_refusal():
        one_host, foreign = (*one_host, "vectored"), (*foreign, "vectored", "vectored")
    half = {"heads": (0, 4)}
    found = [
        Resident(name="anna", town="host", shape=Shape(), lanes=one_host, elder=True),
        Resident(
            name="bert", town="host", lanes=foreign, elder=True, options={"integrity": "crc32c"},
            shape=Shape(axes="block kv head token dim", block_tokens=8, memory="numpy"),
        ),
        Resident(name="carl", town="host", lanes=one_host, shape=Shape(axes="block token head dim", block_tokens=2)),
        Resident(
            name="dora", town="host", lanes=foreign, limits={"peer_window_bytes": 1 << 16},
            shape=Shape(axes="layer kv block token head dim", block_tokens=4, memory="numpy", **half),
        ),
        Resident(
            name="emil", town="host", lanes=one_host, options={"integrity": "xxh3"},
            limits={"node_window_bytes": 1 << 18}, shape=Shape(axes="kv block head token dim"),
        ),
        Resident(
            name="fred", town="host", lanes=one_host,
            shape=Shape(axes="block layer kv token head dim", block_tokens=16, **half),
        ),
        Resident(
            name="gina", town="tcp", lanes=("staged", None), elder=True, env={"UCX_TLS": "tcp"},
            shape=Shape(memory="numpy"),
        ),
        Resident(
            name="hugo", town="tcp", lanes=("staged", None), env={"UCX_TLS": "tcp"},
            shape=Shape(axes="kv block head token dim", block_tokens=8, memory="numpy"),
        ),
    ]  # fmt: skip
    for resident in found:
        resident.listen = f"127.0.0.1:{free_port()}"
    if network is not None:
        shapes = (Shape(), Shape(axes="block token head dim", block_tokens=8))
        for number, (name, shape, host) in enumerate(zip(("ines", "jens"), shapes, network.hosts, strict=True)):
            listen = f"{host.ipv4}:{15_000 + number}"
            found.append(
                Resident(
                    name=name,
                    town="two hosts",
                    shape=shape,
                    lanes=("staged", None),
                    host=host,
                    elder=number == 0,
                    listen=listen,
                )  # fmt: skip
            )
    return found


@contextlib.contextmanager
def two_hosts_or_why_not(wanted: bool) -> Iterator[tuple[Network | None, str]]:
    """Two hosts with a cable between them, or why this machine cannot have them."""
    with contextlib.ExitStack() as stack:
        network, why = None, "not asked for"
        if wanted:
            try:
                network, why = stack.enter_context(networked(2)), ""
            except pytest.skip.Exception as refused:
                why = str(refused)
        yield network, why


def pairs(members: list[Resident]) -> list[tuple[Resident, Resident]]:
    """Every source with every target that finds its heads there."""
    return [
        (source, target)
        for source, target in itertools.permutations(members, 2)
        if source.town == target.town and source.shape.serves(target.shape)
    ]
