"""Worker processes that make one object, obey calls of its methods, and always end."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

from kvlink import errors

__all__ = ["Worker", "WorkerFailed", "serve"]

#: Reaping takes a moment even after SIGKILL: the kernel unmaps the worker's pools first.
_REAP_TIMEOUT_S = 30.0
_STDERR_TAIL_BYTES = 8192

_live_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


class WorkerFailed(AssertionError):
    """A worker process died, or raised something that is no `kvlink.KvlinkError`."""


class _Process(Protocol):
    """What is asked of a started process; `subprocess.Popen` has it."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...

    def wait(self, timeout: float) -> int: ...


class Worker:
    """A process that makes one object and obeys calls of its methods, one at a time.

    `factory` is ``"module:callable"``, imported in the new process. Arguments and results
    travel by pickle over a private pipe. A `kvlink.KvlinkError` raised by a method is raised
    by `call` with the same class; any other exception becomes `WorkerFailed`. Every wait is
    bounded, and the process is reaped by `close` or `kill`, or at exit.
    """

    def __init__(
        self,
        factory: str,
        *,
        arguments: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        python_path: Sequence[str] = (),
        timeout_s: float = 60.0,
    ) -> None:
        """Start the process and wait until the object is made."""
        self._pipe, theirs = multiprocessing.Pipe()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker
        self._process = self._begin(theirs.fileno(), {**os.environ, **(env or {})}, python_path)
        theirs.close()
        _live_workers.add(self)
        try:
            self.call(factory, timeout_s=timeout_s, **(arguments or {}))
        except BaseException:
            self.kill()
            raise

    def _begin(self, pipe_fd: int, env: dict[str, str], python_path: Sequence[str]) -> _Process:
        """Start the process that serves the pipe."""
        return subprocess.Popen(
            [sys.executable, "-c", f"import kvlink.testing.worker as w; w.serve({pipe_fd}, {list(python_path)!r})"],
            pass_fds=[pipe_fd],
            env=env,
            stdin=subprocess.DEVNULL,
            stderr=self._stderr,
        )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def call(self, method: str, *args: Any, timeout_s: float = 30.0, **kwargs: Any) -> Any:
        """Call a method of the worker's object and return its result."""
        self.start(method, *args, **kwargs)
        return self.result(timeout_s=timeout_s)

    def start(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Begin a call; `result` collects it."""
        try:
            self._pipe.send((method, args, kwargs))
        except OSError as error:
            raise WorkerFailed(f"worker {self.pid} is gone: {self.stderr()}") from error

    def result(self, *, timeout_s: float = 30.0) -> Any:
        """Wait for the result of the oldest call begun with `start`.

        Raises
        ------
        WorkerFailed
            If no result came in `timeout_s` (the stacks of the worker's threads are in the
            message), the worker died, or the method raised something other than a `KvlinkError`.
        """
        if not self._pipe.poll(timeout_s):
            raise WorkerFailed(f"worker {self.pid} gave no result within {timeout_s} s:\n{self._stacks()}")
        try:
            raised, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            code = self._reap()
            raise WorkerFailed(f"worker {self.pid} ended with {code}:\n{self.stderr()}") from error
        if raised:
            raise _rebuild(value)
        return value

    def stderr(self) -> str:
        """Return the end of what the worker wrote to its standard error."""
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - _STDERR_TAIL_BYTES))
        return self._stderr.read().decode(errors="replace")

    def pause(self) -> None:
        """Stop the process (SIGSTOP) and return once every thread of it has stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        """Let a paused process run again."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End the process with SIGKILL, as a crash would, and reap it. Safe to call twice."""
        if self._process.poll() is None:
            self._process.kill()
        self._reap()

    def join(self, *, timeout_s: float = _REAP_TIMEOUT_S) -> int:
        """Wait for a process that ends by itself and return its exit code."""
        return self._process.wait(timeout=timeout_s)

    def close(self, *, timeout_s: float = _REAP_TIMEOUT_S) -> int:
        """Let the process end by itself and return its exit code; kill it if it does not.

        Raises
        ------
        WorkerFailed
            If the process had to be killed.
        """
        self._pipe.close()  # end of file: the worker's loop returns and the interpreter exits
        try:
            return self._process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            stacks = self._stacks()
            self.kill()
            raise WorkerFailed(f"worker {self.pid} did not exit within {timeout_s} s:\n{stacks}") from error

    def __enter__(self) -> Worker:
        """Return the worker itself."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Kill and reap the process."""
        self.kill()

    def _reap(self) -> int:
        self._pipe.close()
        return self._process.wait(timeout=_REAP_TIMEOUT_S)

    def _stacks(self) -> str:
        """Ask for the stacks of all threads (`serve` installs the handler) and return the error output."""
        if self._process.poll() is None:
            before = self._stderr.seek(0, os.SEEK_END)
            os.kill(self.pid, signal.SIGUSR1)
            for _ in range(100):
                if self._stderr.seek(0, os.SEEK_END) > before:
                    break
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout=0.02)
        return self.stderr()


@atexit.register
def _kill_live_workers() -> None:
    for worker in list(_live_workers):
        worker.kill()


def _rebuild(described: tuple[str, str, dict[str, Any], str]) -> Exception:
    name, message, attributes, trace = described
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, errors.KvlinkError):
        return kind(message, **attributes)
    return WorkerFailed(f"{name}: {message}\n{trace}")


def _describe(error: BaseException) -> tuple[str, str, dict[str, Any], str]:
    names = ("failed", "valid_prefix_tokens") if isinstance(error, errors.KvlinkError) else ()
    attributes = {name: getattr(error, name) for name in names}
    return type(error).__name__, str(error), attributes, traceback.format_exc()


def serve(pipe_fd: int, python_path: Sequence[str]) -> None:
    """Run the worker's side: make the object, then obey calls until the pipe ends."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    sys.path.extend(python_path)
    pipe: Connection[Any, Any] = Connection(pipe_fd)
    target: Any = None
    with contextlib.suppress(EOFError, BrokenPipeError):  # the caller has closed its end
        while True:
            method, args, kwargs = pipe.recv()
            try:
                if target is None:
                    target, result = _import_callable(method)(**kwargs), None
                else:
                    result = getattr(target, method)(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - the top of the worker: everything goes to the caller
                pipe.send((True, _describe(error)))
            else:
                pipe.send((False, result))


def _import_callable(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return found
