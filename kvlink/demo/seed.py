"""The process that all workers are forked from: it has imported what they need, and nothing else.

Importing torch and transformers takes seconds of CPU, and every worker would pay them again. The
seed loads no model and sees no prompt. Workers come out of it before that, so they share
nothing that a request touches.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from itertools import chain
from types import TracebackType
from typing import NoReturn

__all__ = ["Seed", "main"]

_QUIT_S = 5.0
_PRELOADED = ("torch", "transformers.modeling_utils", "transformers.models.auto", "kvlink.demo.worker")
# A worker finds its modules where the parent does, whatever directory both were started in.
_BOOT = "import sys; sys.path[:] = {path!r}; from kvlink.demo.seed import main; main({fd})"


class Seed:
    """The parent's handle of the seed. A context manager: when it ends, so have all workers."""

    def __init__(self, *, threads: int) -> None:
        self._control, seed_end = socket.socketpair()
        with seed_end:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT.format(path=sys.path, fd=seed_end.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[seed_end.fileno()],
                env=_environment(threads),
                start_new_session=True,
            )

    def __enter__(self) -> Seed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._control.close()
        if kind is not None:
            self.kill()
        try:
            self._process.wait(timeout=_QUIT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait(timeout=_QUIT_S)

    def fork(self, *, stdin: int, stdout: int, stderr: int) -> None:
        """Fork a worker with these descriptors, as soon as the imports are done. Does not wait; closes none.

        Should the seed be gone, the worker's pipe ends at once: that is how the caller learns of it.
        """
        with suppress(BrokenPipeError):
            socket.send_fds(self._control, [b"f"], [stdin, stdout, stderr])

    def kill(self) -> None:
        """Kill the seed and all workers at once."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def main(control_fd: int) -> None:
    """Fork a worker for each three descriptors that arrive; end when the parent closes the socket.

    Never returns, in the seed or in a worker: what an interpreter does at its end costs seconds
    with so much imported, and has nothing left to do for a process that has closed its node.
    """
    for module in _PRELOADED:
        import_module(module)
    gc.freeze()  # Or each collection in a worker would copy the pages that it shares with the seed.
    outputs_by_pid: dict[int, list[int]] = {}
    signal.signal(signal.SIGCHLD, lambda *_: _reap(outputs_by_pid))
    control = socket.socket(fileno=control_fd)
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, 1, 3)
        if not request:
            os._exit(0)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        pid = os.fork()
        if pid == 0:
            break
        os.close(descriptors[0])
        outputs_by_pid[pid] = descriptors[1:]
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    # Another worker's pipe must not stay open because this one holds it too.
    for descriptor in (control.detach(), *chain.from_iterable(outputs_by_pid.values())):
        os.close(descriptor)
    _become_worker(descriptors)


def _become_worker(descriptors: list[int]) -> NoReturn:
    for standard, descriptor in enumerate(descriptors):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    code = 1
    try:
        code = import_module("kvlink.demo.worker").main()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _reap(outputs_by_pid: dict[int, list[int]]) -> None:
    """Collect the workers that have ended. Only then does the parent see a pipe end, and what is said about it."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            stdout, stderr = outputs_by_pid.pop(pid)
            if os.WIFSIGNALED(status):
                os.write(stderr, f"killed by {signal.Signals(os.WTERMSIG(status)).name}\n".encode())
            os.close(stdout)
            os.close(stderr)


def _environment(threads: int) -> dict[str, str]:
    """Return the environment of all workers: no network, a fixed number of threads, no progress bars."""
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": "1",  # NumPy's, unused: a thread of it in the seed would not survive the fork
    }
