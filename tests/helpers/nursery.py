"""A process that has imported what workers need, and forks one when asked: 30 ms instead of half a second of CPU.

A worker must be a child of whoever asked, who stops, kills and reaps it. So the nursery forks twice: the process in
between ends at once, and the worker, an orphan then, is adopted by the nearest subreaper, which the asker has made
itself. A worker ends as any interpreter does, with its checks for leaks.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

_PR_SET_CHILD_SUBREAPER = 36
#: A fork takes milliseconds; the first one waits for the imports, on a machine that may be busy.
_FORK_TIMEOUT_S = 60.0
_PRELOADED = ("asyncio", "kvlink.handoff.node", "kvlink.layout.cache", "kvlink.testing.worker", "helpers.node_worker")
#: What the loader or the interpreter reads as it starts cannot be given to a process that has started already.
_READ_AT_START = ("PYTHON", "LD_", "OPENBLAS", "MALLOC", "GLIBC")
_MOST_REQUEST_BYTES = 1 << 20
_BOOT = "import sys; sys.path[:] = {path!r}; from helpers.nursery import main; main({fd})"


class Adopted:
    """A worker that the nursery has forked, with what `subprocess.Popen` offers of the same names."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float) -> int:
        if self.poll() is None:
            descriptor = os.pidfd_open(self.pid)
            try:
                select.select([descriptor], [], [], timeout)
            finally:
                os.close(descriptor)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout)
        return code


class Nursery:
    """The asker's end. Ends with the asker, whose socket it reads."""

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(_FORK_TIMEOUT_S)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT.format(path=sys.path, fd=theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # one thread here, or forking would lose the others
            )
        self._started_with = dict(os.environ)

    def can_give(self, env: Mapping[str, str]) -> bool:
        """Whether a worker that is forked can have this environment."""
        differ = dict(env).items() ^ self._started_with.items()
        return not any(name.startswith(_READ_AT_START) for name, _ in differ)

    def fork(self, *, pipe: int, stderr: int, env: Mapping[str, str], python_path: Sequence[str]) -> Adopted:
        """Return a worker that serves `pipe`."""
        request = pickle.dumps((dict(env), list(python_path)))
        socket.send_fds(self._control, [request], [pipe, stderr])
        return Adopted(int(self._control.recv(32)))


def main(control_fd: int) -> None:
    """Fork a worker for each request. In a worker, returns once the worker is done, so that the interpreter ends."""
    for module in _PRELOADED:
        importlib.import_module(module)
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the asker decides
    control = socket.socket(fileno=control_fd)
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, _MOST_REQUEST_BYTES, 2)
        if not request:
            os._exit(0)
        between = os.fork()
        if between:
            os.waitpid(between, 0)
            for descriptor in descriptors:
                os.close(descriptor)
            continue
        worker = os.fork()
        if worker:
            control.send(str(worker).encode())
            os._exit(0)
        break
    control.close()
    _become_worker(request, *descriptors)


def _become_worker(request: bytes, pipe: int, stderr: int) -> None:
    from kvlink.testing.worker import serve

    env, python_path = pickle.loads(request)
    os.environ.clear()
    os.environ.update(env)
    os.dup2(stderr, 2)
    os.close(stderr)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    serve(pipe, python_path)
