"""A real etcd on loopback, that tests start, kill, stop and start again."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

needs_etcd = pytest.mark.skipif(not shutil.which("etcd"), reason="no etcd here: apt-get install etcd-server")

_READY_TIMEOUT_S = 30.0


class EtcdServer:
    """One member over a folder of its own, at the same ports whenever it runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports = _free_ports(2)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self._ports[0]}"

    def start(self) -> None:
        """Start it and wait until it answers."""
        client, peer = (f"http://127.0.0.1:{port}" for port in self._ports)
        self._process = subprocess.Popen(
            [
                *("etcd", "--name=one", f"--data-dir={self._folder}", "--unsafe-no-fsync", "--log-level=error"),
                *(f"--listen-client-urls={client}", f"--advertise-client-urls={client}"),
                *(f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"),
                *(f"--initial-cluster=one={peer}", "--heartbeat-interval=50", "--election-timeout=250"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        until = time.monotonic() + _READY_TIMEOUT_S
        while True:
            assert self._process.poll() is None, f"etcd ended with {self._process.returncode}"
            assert time.monotonic() < until, "etcd did not answer in time"
            try:
                with opener.open(f"{client}/health", timeout=1) as answer:
                    if b'"true"' in answer.read():
                        return
            except OSError:
                time.sleep(0.02)  # nothing tells that it listens now

    def kill(self) -> None:
        """End it at once, as a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=10)
            self._process = None

    def pause(self) -> None:
        """Stop it: connections stay, and nothing answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """End a pause."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
