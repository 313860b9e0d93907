"""Several hosts on one machine: network namespaces around a switch, each with a boot id of its own.

A host is a network namespace with an interface, `kv0`, whose cable leads to a bridge in a namespace that
stands for the switch, and another, `kv1`, that leads nowhere. A worker that enters a host sees its
interfaces only, its `/sys`, and another boot id: so kvlink and UCX alike take it for another machine, and
no lane of one host is there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from helpers.markers import Lane
from helpers.node_worker import NodeWorker
from helpers.processes import Pair, spawn_worker
from helpers.system_calls import BIND, NEW_NAMESPACE, NEW_NET, check, libc, mount, unshare
from kvlink.testing import Worker

__all__ = ["BETWEEN_HOSTS", "Host", "HostPair", "Network", "enter", "networked", "skip_without_namespaces"]

#: What two hosts have between them.
BETWEEN_HOSTS = Lane(id="staged-hosts", lane="staged", memory="numpy")
INTERFACE, DEAD_END = "kv0", "kv1"
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_MNT_DETACH = 2
_COMMAND_S = 20


@dataclass(frozen=True, kw_only=True)
class Host:
    """A namespace and where it is reached. Without a boot id it is this machine behind another network."""

    namespace: str
    port: str
    ipv4: str
    ipv6: str
    boot_id: str | None

    def spawn(self, env: dict[str, str] | None = None) -> Worker:
        """Start a worker with a node in this host."""
        return spawn_worker("helpers.two_hosts:enter", env, namespace=self.namespace, boot_id=self.boot_id)

    def listen(self, family: str) -> str:
        """Where a node of this host listens."""
        return f"{self.ipv4}:0" if family == "ipv4" else f"[{self.ipv6}]:0"

    def sockets(self, *, pid: int) -> list[str]:
        """The local addresses of all TCP sockets that the process has in this host, ports cut off."""
        listed = _run("ip", "netns", "exec", self.namespace, "ss", "-H", "-t", "-a", "-n", "-p").splitlines()
        own = [line.split()[3] for line in listed if f"pid={pid}," in line]
        return sorted({address.rpartition(":")[0].strip("[]").partition("%")[0] for address in own})


@dataclass(kw_only=True)
class Network:
    """The switch and its hosts."""

    switch: str
    hosts: list[Host] = field(default_factory=list)

    def pull_cable(self, host: Host) -> None:
        """Take the cable of a host out at the switch: the host loses its carrier, and keeps its addresses."""
        _run("ip", "-n", self.switch, "link", "set", host.port, "down")

    def put_cable(self, host: Host) -> None:
        """Put it back."""
        _run("ip", "-n", self.switch, "link", "set", host.port, "up")

    def shape(self, host: Host, *, mbit: int) -> None:
        """Let so much through to a host, and no more."""
        _run(
            *("tc", "-n", self.switch, "qdisc", "replace", "dev", host.port, "root"),
            *("tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "20ms"),
        )

    def lose(self, host: Host) -> None:
        """Let the host vanish as one that lost its power does: nothing answers, nothing is closed."""
        _run("ip", "-n", self.switch, "link", "delete", host.port)


def skip_without_namespaces() -> None:
    """Skip where network namespaces cannot be made."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("no network namespaces: iproute2 is not installed")
    if os.geteuid() != 0:
        pytest.skip("no network namespaces: making them needs root")
    name = f"kvlink-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, timeout=_COMMAND_S)
    if made.returncode != 0:
        pytest.skip(f"no network namespaces: {made.stderr.strip()}")
    _run("ip", "netns", "delete", name)


@contextlib.contextmanager
def networked(hosts: int, *, same_machine: bool = False) -> Iterator[Network]:
    """Make so many hosts around a switch, and remove them in the end."""
    skip_without_namespaces()
    tag = f"kvlink-{os.getpid()}-{uuid.uuid4().hex[:4]}"
    network = Network(switch=f"{tag}-switch")
    for index in range(1, hosts + 1):
        network.hosts.append(
            Host(
                namespace=f"{tag}-{index}",
                port=f"port{index}",
                ipv4=f"10.77.0.{index}",
                ipv6=f"fd77::{index}",
                boot_id=None if same_machine else str(uuid.uuid4()),
            )
        )
    namespaces = [network.switch, *(host.namespace for host in network.hosts)]
    try:
        _batch([f"netns add {name}" for name in namespaces])
        _batch(
            ["link add br0 type bridge forward_delay 0", "link set br0 up"]
            + [f"link add {host.port} type veth peer name {INTERFACE} netns {host.namespace}" for host in network.hosts]
            + [f"link set {host.port} master br0 up" for host in network.hosts],
            namespace=network.switch,
        )
        for host in network.hosts:
            _batch(
                [
                    "link set lo up",
                    f"addr add {host.ipv4}/24 dev {INTERFACE}",
                    f"addr add {host.ipv6}/64 dev {INTERFACE} nodad",
                    f"link set {INTERFACE} up",
                    f"link add {DEAD_END} type veth peer name {DEAD_END}x",
                    f"addr add {host.ipv4.replace('77', '88')}/24 dev {DEAD_END}",
                    f"addr add {host.ipv6.replace('77', '88')}/64 dev {DEAD_END} nodad",
                    f"link set {DEAD_END} up",
                    f"link set {DEAD_END}x up",
                ],
                namespace=host.namespace,
            )
        yield network
    finally:
        for name in namespaces:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=_COMMAND_S)


class HostPair(Pair):
    """A source on one host and a target on another."""

    def __init__(self, hosts: Sequence[Host], lane: Lane = BETWEEN_HOSTS) -> None:
        super().__init__(hosts[0].spawn(), hosts[1].spawn(), lane)
        self.hosts = hosts

    def open_on(self, family: str, **options: Any) -> dict[str, Any]:
        """Start nodes that listen on their hosts' addresses of this family."""
        listen, there = (host.listen(family) for host in self.hosts)
        return self.open(listen=listen, target_options={"listen": there}, secret="s", **options)

    def end(self) -> None:
        """Kill both processes."""
        for worker in (self.source, self.target):
            worker.kill()


def enter(*, namespace: str, boot_id: str | None) -> NodeWorker:
    """Move this process, which has one thread, into a host, and return what obeys calls there."""
    with Path(f"/run/netns/{namespace}").open() as found:
        check(libc().setns(found.fileno(), NEW_NET), "setns")
    unshare(NEW_NAMESPACE)
    libc().umount2(b"/sys", _MNT_DETACH)
    mount("sysfs", "/sys", kind="sysfs")  # shows the interfaces of the namespace that it is mounted in
    if boot_id is not None:
        with tempfile.NamedTemporaryFile("w") as file:
            file.write(boot_id + "\n")
            file.flush()
            mount(file.name, _BOOT_ID, flags=BIND)
    return NodeWorker()


def _batch(commands: Sequence[str], *, namespace: str | None = None) -> None:
    within = [] if namespace is None else ["-n", namespace]
    done = subprocess.run(
        ["ip", *within, "-batch", "-"], input="\n".join(commands), capture_output=True, text=True, timeout=_COMMAND_S
    )
    assert done.returncode == 0, f"{commands}: {done.stderr}"


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout
