"""What tests of engine adapters need: tagged KV elements, and worker processes that always end.

Needs NumPy. Elements are tagged with their global coordinate, so that a copy which lands in
the wrong layer, block, token, head or dim is told apart from a right one.
"""

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
import zlib
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from kvlink import errors

__all__ = ["Worker", "WorkerFailed", "check_tokens", "fill_tokens"]

#: Reaping takes a moment even after SIGKILL: the kernel unmaps the worker's pools first.
_REAP_TIMEOUT_S = 30.0
_STDERR_TAIL_BYTES = 8192

_live_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


def fill_tokens(
    tensors: Mapping[str, Any], *, axes: str, blocks: Sequence[int], num_tokens: int, seed: int = 0
) -> None:
    """Write a tag of its coordinate into every element of tokens ``[0, num_tokens)``.

    Takes the same `tensors` and `axes` as ``KVCache.from_tensors``; values must be writable
    through NumPy (view bfloat16 or fp8 torch tensors as integers of the same size first).
    Tokens in holes (``-1``) are left alone.
    """
    for layer, component, array in _components(tensors, axes):
        for token, block, offset in _tokens(array, blocks, range(num_tokens)):
            array[block, offset] = _tags(array, layer=layer, component=component, token=token, seed=seed)


def check_tokens(
    tensors: Mapping[str, Any],
    *,
    axes: str,
    blocks: Sequence[int],
    num_tokens: int,
    skip_tokens: int = 0,
    seed: int = 0,
) -> None:
    """Compare tokens ``[skip_tokens, num_tokens)`` with what `fill_tokens` wrote for the same seed.

    `blocks` is the table of the side that is checked; holes (``-1``) are not compared.

    Raises
    ------
    AssertionError
        Names the layer, component, token, head and dim of the first wrong element, and how
        many elements of that token are wrong.
    """
    for layer, component, array in _components(tensors, axes):
        for token, block, offset in _tokens(array, blocks, range(skip_tokens, num_tokens)):
            found = _as_bits(array[block, offset])
            expected = _as_bits(_tags(array, layer=layer, component=component, token=token, seed=seed))
            wrong = np.argwhere(found != expected)
            if len(wrong):
                head, dim = (int(index) for index in wrong[0])
                raise AssertionError(
                    f"layer {layer!r} component {component} token {token} (block {block}, offset {offset}) "
                    f"head {head} dim {dim}: found {found[head, dim]:#x}, expected {expected[head, dim]:#x}; "
                    f"{len(wrong)} of {found.size} elements of this token are wrong"
                )


def _components(tensors: Mapping[str, Any], axes: str) -> list[tuple[str, str, npt.NDArray[Any]]]:
    """Return views of every K and V, with dimensions ordered ``block token head dim``."""
    names = axes.split()
    found = []
    for layer, value in tensors.items():
        apart = value if isinstance(value, Mapping) else None
        if apart is None:
            fused = np.moveaxis(np.asarray(value), names.index("kv"), 0)
            apart = {"k": fused[0], "v": fused[1]}
        inner = [name for name in names if name != "kv"]
        order = [inner.index(name) for name in ("block", "token", "head", "dim")]
        found += [(layer, component, np.asarray(array).transpose(order)) for component, array in apart.items()]
    return found


def _tokens(array: npt.NDArray[Any], blocks: Sequence[int], tokens: range) -> list[tuple[int, int, int]]:
    block_tokens = array.shape[1]
    placed = [(token, int(blocks[token // block_tokens]), token % block_tokens) for token in tokens]
    return [entry for entry in placed if entry[1] >= 0]


def _tags(array: npt.NDArray[Any], *, layer: str, component: str, token: int, seed: int) -> npt.NDArray[Any]:
    """One tag per (head, dim), as elements of the array's own type."""
    _, _, heads, dims = array.shape
    start = zlib.crc32(f"{seed}/{layer}/{component}/{token}".encode())
    index = np.arange(heads * dims, dtype=np.uint64).reshape(heads, dims)
    mixed = (index + np.uint64(start)) * np.uint64(0x9E3779B97F4A7C15)  # wraps: a multiplicative hash
    mixed ^= mixed >> np.uint64(29)
    bits: npt.NDArray[Any] = mixed.astype(np.dtype(f"u{array.dtype.itemsize}"))
    return bits.view(array.dtype)


def _as_bits(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Compare bit patterns: a tag may be a NaN, which is unequal to itself."""
    return np.ascontiguousarray(array).view(np.dtype(f"u{array.dtype.itemsize}"))


class WorkerFailed(AssertionError):
    """A worker process died, or raised something that is no `kvlink.KvlinkError`."""


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
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"import kvlink.testing as t; t._serve({theirs.fileno()}, {list(python_path)!r})"],
            pass_fds=[theirs.fileno()],
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stderr=self._stderr,
        )
        theirs.close()
        _live_workers.add(self)
        try:
            self.call(factory, timeout_s=timeout_s, **(arguments or {}))
        except BaseException:
            self.kill()
            raise

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
        """Ask for the stacks of all threads (`_serve` installs the handler) and return the error output."""
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


def _serve(pipe_fd: int, python_path: Sequence[str]) -> None:
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
