"""The worker processes of one run of the demo: started together, listened to in one place, ended together."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import TypeVar

from kvlink.demo import messages as m
from kvlink.demo.display import Display
from kvlink.demo.process import Inbox, WorkerProcess
from kvlink.demo.seed import Seed
from kvlink.demo.weights import find_model

__all__ = ["Fleet"]

# Longer than any single step may take: a first conversion, or a prefill of thousands of tokens on a busy machine.
_SILENCE_S = 600.0
_Message = TypeVar("_Message", bound=m.FromWorker)


class Fleet:
    """Owns the workers; a context manager, so that none outlives it."""

    def __init__(self, *, threads: int, display: Display) -> None:
        self._display = display
        self._threads = threads
        self._inbox = Inbox()
        self._seed = Seed(threads=threads)
        self._processes: list[WorkerProcess] = []
        #: The longest sequence that every loaded model takes, in tokens.
        self.max_positions = 1 << 62

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._seed:
            if kind is not None:
                self._seed.kill()
            for process in self._processes:
                process.close_input()  # All at once, so that they leave at the same time.
            for process in self._processes:
                process.close()

    def start(self, role: str, name: str, model: Path, *, threads: int | None = None) -> WorkerProcess:
        """Start a worker; it loads the model meanwhile."""
        start = m.Start(role=role, name=name, model=str(model), threads=threads or self._threads)
        process = WorkerProcess(start, self._inbox, self._seed)
        self._processes.append(process)
        self._display.stage(name, "starting")
        return process

    def converted(self, model: Path) -> Path:
        """Return the model's directory, converting a GGUF file if that was not done before."""
        if model.is_dir():
            return model
        directory, is_there = find_model(model)
        if not is_there:
            converter = self.start("convert", "convert", model)
            self.wait_for(m.Converted, count=1)
            converter.close()
        return directory

    def next(self) -> tuple[WorkerProcess, m.FromWorker]:
        """Return the next message and who sent it. Shows what it says of a worker's start.

        Raises
        ------
        KvlinkError
            What a worker has failed with, or that one ended or fell silent.
        """
        worker, message = self._inbox.get(timeout_s=_SILENCE_S)
        match message:
            case m.Stage():
                self._display.stage(worker.name, message.text)
            case m.Loaded():
                self.max_positions = min(self.max_positions, message.max_positions)
                self._display.stage(worker.name, "answering" if worker.name == "reference" else "loaded")
            case m.Converted() | m.Ready():
                self._display.ready(worker.name)
            case _:
                pass
        return worker, message

    def wait_for(self, kind: type[_Message], *, count: int) -> list[_Message]:
        """Return the next `count` messages of a kind; others that come meanwhile are dropped."""
        found: list[_Message] = []
        while len(found) < count:
            _, message = self.next()
            if isinstance(message, kind):
                found.append(message)
        return found
