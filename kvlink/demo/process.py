"""The parent's side of its worker processes: start, send, receive, and always reap."""

from __future__ import annotations

import os
import queue
import tempfile
import threading
from contextlib import suppress

import msgspec

from kvlink.demo.messages import Failed, FromWorker, Start, ToWorker
from kvlink.demo.seed import Seed
from kvlink.errors import DeadlineExceeded, KvlinkError, PeerLost, error_class

__all__ = ["Inbox", "WorkerProcess"]

_QUIT_S = 5.0


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
            raise PeerLost(f"run {worker.name}: the process has ended{worker.last_words()}")
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

    def __init__(self, start: Start, inbox: Inbox, seed: Seed) -> None:
        self.name = start.name
        self.is_closed = False
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        stdin, to_worker = os.pipe()
        from_worker, stdout = os.pipe()
        self._input = os.fdopen(to_worker, "wb", buffering=0)
        self._output = os.fdopen(from_worker, "rb")
        seed.fork(stdin=stdin, stdout=stdout, stderr=self._printed.fileno())
        os.close(stdin)
        os.close(stdout)
        self._thread = threading.Thread(target=self._read, args=(inbox,), name=f"read-{self.name}", daemon=True)
        self._thread.start()
        self.send(start)

    def send(self, message: ToWorker) -> None:
        """Send one message. To a worker that has ended it is lost: the inbox says that it has."""
        line = memoryview(msgspec.json.encode(message) + b"\n")
        with suppress(BrokenPipeError):
            while line:
                line = line[self._input.write(line) or 0 :]

    def last_words(self) -> str:
        """Return the end of what the worker printed, on lines of its own, or nothing."""
        size = os.fstat(self._printed.fileno()).st_size
        tail = os.pread(self._printed.fileno(), 2000, max(0, size - 2000)).decode(errors="replace").strip()
        return f"; it printed:\n{tail}" if tail else ""

    def close_input(self) -> None:
        """Tell the worker to leave, and do not wait for it; ``close`` is still to be called."""
        self._input.close()

    def close(self) -> None:
        """End the worker: it leaves when its input ends. One that stays is killed with the seed."""
        if self.is_closed:
            return
        self.is_closed = True
        self.close_input()
        self._thread.join(timeout=_QUIT_S)
        if not self._thread.is_alive():
            self._output.close()
        self._printed.close()

    def _read(self, inbox: Inbox) -> None:
        decoder: msgspec.json.Decoder[FromWorker] = msgspec.json.Decoder(FromWorker)
        # A line cut off by a crash ends the stream like the end of the pipe does.
        with suppress(msgspec.DecodeError):
            for line in self._output:
                inbox.put(self, decoder.decode(line))
        inbox.put(self, None)
