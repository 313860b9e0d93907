"""Other libraries that move the same blocks: processes of an environment of their own, driven by lines of JSON.

A peer is two processes, a source and a target, that run one driver of ``benchmarks/peers`` of a checkout
(its README tells what a driver must have). While it is another system's turn they are stopped (SIGSTOP),
so that threads which spin in them slow nobody else.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kvlink
from kvlink.bench.scattered import Table
from kvlink.bench.source import SEED
from kvlink.bench.systems import DEADLINE_S, Moved, Setting, Tables
from kvlink.errors import PeerLost, ProtocolError, TransportFailed

__all__ = ["PEERS", "PeerPlace", "PeerProcess", "PeerSystem", "checkout_place"]

#: Systems that a driver of benchmarks/peers moves blocks by.
PEERS = ("ucx", "ucxx", "nixl", "nixl-default", "mooncake")

_REAP_TIMEOUT_S = 30.0
#: A process whose socket has closed is about to end.
_ENDING_S = 1.0
_STDERR_TAIL_BYTES = 2000
#: Tables and addresses are far shorter; a line without an end would otherwise fill the memory.
_MOST_LINE_BYTES = 64 << 20


class PeerPlace:
    """Where the drivers lie, and the Python that runs them."""

    def __init__(self, *, python: Path, drivers: Path) -> None:
        """Take both as they are; `missing` tells what is not there."""
        self.python = python
        self.drivers = drivers

    def missing(self, name: str) -> str | None:
        """Return why the peer `name` cannot be measured, or None if it can. Imports its library, in a process."""
        if not self.python.exists():
            return f"{name}: not installed, run `make peers` in a checkout of kvlink"
        command = [str(self.python), str(self.drivers / "serve.py"), name, "--check"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{name}: {' '.join(str(error).split())}"
        if done.returncode == 0:
            return None
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return f"{name}: not installed, run `make peers` ({said})"


def checkout_place() -> PeerPlace:
    """Return the place that ``make peers`` fills; ``KVLINK_PEERS`` names another environment."""
    root = Path(kvlink.__file__).resolve().parent.parent
    environment = Path(os.environ.get("KVLINK_PEERS") or root / ".venv-peers")
    return PeerPlace(python=environment / "bin" / "python", drivers=root / "benchmarks" / "peers")


class PeerProcess:
    """One side of a peer: a process that answers one line of JSON with another."""

    def __init__(self, place: PeerPlace, name: str, role: str) -> None:
        """Start it. It is reaped by `kill`."""
        self._called = f"bench transfer: the {role} of peer {name}"
        self._link, theirs = socket.socketpair()
        self._link.settimeout(DEADLINE_S)
        self._received = bytearray()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        with theirs:
            self._process = subprocess.Popen(
                [str(place.python), str(place.drivers / "serve.py"), name, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # Were it stopped in the caller's group, the end of the caller's shell would hang up on the whole group.
                start_new_session=True,
                stdout=self._stderr,  # libraries print there, and ours may be JSON
                stderr=self._stderr,
            )

    def call(self, operation: str, **arguments: Any) -> Any:
        """Send one request and return its result.

        Raises
        ------
        PeerLost, ProtocolError, TransportFailed
            If the process has ended or is silent, answers what is no JSON, or says that it failed.
        """
        self.start(operation, **arguments)
        return self.result()

    def start(self, operation: str, **arguments: Any) -> None:
        """Send one request; `result` collects what came of it. Raises PeerLost."""
        try:
            self._link.sendall(json.dumps({"operation": operation, **arguments}).encode() + b"\n")
        except OSError as error:
            raise self._lost(str(error)) from error

    def result(self) -> Any:
        """Return the result of the request that was sent last. Raises as `call`."""
        line = self._line()
        try:
            answer = json.loads(line)
            error = answer.get("error")
        except (ValueError, AttributeError) as cause:
            raise ProtocolError(f"{self._called} answered {line[:80]!r}, which is no JSON object") from cause
        if error is not None:
            raise TransportFailed(f"{self._called}: {' '.join(str(error).split())}")
        return answer.get("result")

    def pause(self) -> None:
        """Stop it until `resume`."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End and reap it. Safe to call twice."""
        self._link.close()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(timeout=_REAP_TIMEOUT_S)

    def _line(self) -> bytes:
        until = time.monotonic() + DEADLINE_S
        while (end := self._received.find(b"\n")) < 0:
            try:
                more = self._link.recv(1 << 16)
            except OSError as error:  # also when the time is over
                raise self._lost(str(error)) from error
            if not more:
                raise self._lost("it has ended")
            self._received += more
            if len(self._received) > _MOST_LINE_BYTES or time.monotonic() > until:
                raise self._lost("its answer has no end")
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        return line

    def _lost(self, cause: str) -> PeerLost:
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - _STDERR_TAIL_BYTES))
        said = self._stderr.read().decode(errors="replace").split()
        with contextlib.suppress(subprocess.TimeoutExpired):
            cause += f" with code {self._process.wait(timeout=_ENDING_S)}"
        return PeerLost(f"{self._called} is lost: {cause}; it said: {' '.join(said) or 'nothing'}")


class PeerSystem:
    """Both processes of one peer."""

    memory = "private"

    def __init__(self, name: str, place: PeerPlace, setting: Setting) -> None:
        """Start both processes, and let them know each other."""
        self.name = name
        self._processes: list[PeerProcess] = []
        geometry = setting.geometry
        try:
            for role in ("source", "target"):
                self._processes.append(PeerProcess(place, name, role))
            opened = [
                process.call(
                    "open",
                    role=role,
                    block_bytes=geometry.block_bytes,
                    pool_blocks=geometry.pool_blocks,
                    entries=geometry.entries,
                    seed=SEED,
                )
                for process, role in zip(self._processes, ("source", "target"), strict=True)
            ]
            self.op: str = opened[0]["op"]
            self._reason: str = opened[0]["about"]
            self._connect([side["address"] for side in opened])
            self._pause()
        except BaseException:
            self.close()
            raise

    def move(self, tables: Tables) -> Moved:
        """Move the blocks of one request, from the source's first call of its library until both sides know the end."""
        source, target = self._processes
        for process in self._processes:
            process.resume()
        request = {"source": _encoded(tables[0]), "target": _encoded(tables[1])}
        for process in (target, source):
            process.call("prepare", **request)
        target.start("move")
        source.start("move")
        sent, received = source.result(), target.result()
        verified = target.call("verify")
        self._pause()
        return Moved(
            # Both read the clock of this host, which does not go back.
            seconds=max(sent["ended"], received["ended"]) - sent["began"],
            cpu_source_s=sent["cpu_s"],
            cpu_target_s=received["cpu_s"],
            lane=sent["lane"],
            verified=verified is True,
            post_s=sent.get("post_s"),
        )

    def reason(self) -> str:
        """Return what the driver says of its library."""
        return self._reason

    def close(self) -> None:
        """Kill both processes: what their libraries do at exit is not what is measured."""
        for process in self._processes:
            process.kill()

    def _connect(self, addresses: Sequence[Any]) -> None:
        # Both at once: connecting may need the other side to answer.
        for process, address in zip(self._processes, reversed(addresses), strict=True):
            process.start("connect", address=address)
        for process in self._processes:
            process.result()

    def _pause(self) -> None:
        for process in self._processes:
            process.pause()


def _encoded(table: Table) -> str:
    return base64.b64encode(table.astype("<i4").tobytes()).decode()
