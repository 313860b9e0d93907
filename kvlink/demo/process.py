"""The parent's side of its worker processes: start, send, receive, and always reap."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from typing import IO

import msgspec

from kvlink.demo.messages import Failed, FromWorker, Start, ToWorker
from kvlink.errors import DeadlineExceeded, KvlinkError, PeerLost, error_class

__all__ = ["Inbox", "WorkerProcess"]

_QUIT_S = 5.0
# A worker finds its modules where the parent does, whatever directory both were started in.
_BOOT = "import sys; sys.path[:] = {path!r}; from kvlink.demo.worker import main; main()"


class Inbox:
    """The messages of all workers in the order of their arrival."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[WorkerProcess, FromWorker | None]] = queue.SimpleQueue()

    def put(self, worker: WorkerProcess, message: FromWorker | None) -> None:
        """Add a message; None says that the worker's pipe has ended. Called by the reading threads."""
        self._queue.put((worker, message))

    def get(self, *, timeout_s: float) -> tuple[WorkerProcess, FromWorker]:
        """Return the next message and who sent it.

        Raises
        ------
        DeadlineExceeded
            If none arrives in `timeout_s` seconds.
        PeerLost
            If a worker has ended.
        KvlinkError
            What a worker has failed with, by its class and message.
        """
        worker, message = self._next(timeout_s)
        while message is None and worker.is_closed:
            worker, message = self._next(timeout_s)
        if message is None:
            raise PeerLost(f"run {worker.name}: the process ended with exit code {worker.wait()}{worker.last_words()}")
        if isinstance(message, Failed):
            raise _failure(worker, message)
        return worker, message

    def _next(self, timeout_s: float) -> tuple[WorkerProcess, FromWorker | None]:
        try:
            return self._queue.get(timeout=timeout_s)
        except queue.Empty:
            raise DeadlineExceeded(f"run the demo: no worker had anything to say for {timeout_s:g} s") from None


def _failure(worker: WorkerProcess, message: Failed) -> KvlinkError:
    kind = error_class(message.error)
    if kind.__name__ == message.error:
        return kind(f"{worker.name}: {message.message}")
    return KvlinkError(f"{worker.name}: {message.error}: {message.message}")


class WorkerProcess:
    """One worker. Messages from it go to `inbox`; what it prints is kept for the case that it fails."""

    def __init__(self, start: Start, inbox: Inbox) -> None:
        self.name = start.name
        self.is_closed = False
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT.format(path=sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._printed,
            env=_environment(start.threads),
        )
        self._thread = threading.Thread(target=self._read, args=(inbox,), name=f"read-{self.name}", daemon=True)
        self._thread.start()
        self.send(start)

    def send(self, message: ToWorker) -> None:
        """Send one message.

        Raises
        ------
        PeerLost
            If the worker has ended.
        """
        try:
            stdin = _pipe(self._process.stdin)
            stdin.write(msgspec.json.encode(message) + b"\n")
            stdin.flush()
        except BrokenPipeError:
            raise PeerLost(f"send to {self.name}: the process has ended{self.last_words()}") from None

    def wait(self) -> int:
        """Return the exit code of a worker whose pipe has ended; kill it if it stays."""
        try:
            return self._process.wait(timeout=_QUIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def last_words(self) -> str:
        """Return the end of what the worker printed, on lines of its own, or nothing."""
        size = os.fstat(self._printed.fileno()).st_size
        tail = os.pread(self._printed.fileno(), 2000, max(0, size - 2000)).decode(errors="replace").strip()
        return f"; it printed:\n{tail}" if tail else ""

    def close_input(self) -> None:
        """Tell the worker to leave, and do not wait for it; ``close`` is still to be called."""
        with suppress(BrokenPipeError):
            _pipe(self._process.stdin).close()

    def close(self) -> None:
        """End the worker: it leaves when its input ends, and is killed if it does not."""
        if self.is_closed:
            return
        self.is_closed = True
        self.close_input()
        self.wait()
        self._thread.join(timeout=_QUIT_S)
        _pipe(self._process.stdout).close()
        self._printed.close()

    def kill(self) -> None:
        """End the worker at once; ``close`` is still to be called."""
        self._process.kill()

    def _read(self, inbox: Inbox) -> None:
        decoder: msgspec.json.Decoder[FromWorker] = msgspec.json.Decoder(FromWorker)
        # A line cut off by a crash ends the stream like the end of the pipe does.
        with suppress(msgspec.DecodeError):
            for line in _pipe(self._process.stdout):
                inbox.put(self, decoder.decode(line))
        inbox.put(self, None)


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None, "made with PIPE"
    return stream


def _environment(threads: int) -> dict[str, str]:
    """Return the environment of a worker: no network, a fixed number of threads, no progress bars."""
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
    }
