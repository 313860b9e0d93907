"""The inside of a worker process: a loop over messages that arrive on standard input."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from kvlink.demo.decode_worker import run_decode
from kvlink.demo.messages import Converted, Failed, FromWorker, Loaded, Stage, Start, ToWorker
from kvlink.demo.model import LanguageModel
from kvlink.demo.prefill_worker import run_prefill
from kvlink.demo.reference_worker import run_reference
from kvlink.demo.weights import convert, find_model

__all__ = ["Channel", "main"]


class Channel:
    """The worker's end of its two pipes.

    Whatever else prints to standard output goes to standard error from here on: the pipe
    carries messages only.
    """

    def __init__(self) -> None:
        self._input = os.fdopen(os.dup(0), "rb")
        self._output = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)
        self._decoder: msgspec.json.Decoder[ToWorker] = msgspec.json.Decoder(ToWorker)

    def __iter__(self) -> Iterator[ToWorker]:
        """Yield messages until the parent closes the pipe or is gone."""
        for line in self._input:
            yield self._decoder.decode(line)

    def send(self, message: FromWorker) -> None:
        """Send one message to the parent."""
        self._output.write(msgspec.json.encode(message) + b"\n")


def main() -> None:
    """Run one worker until its input ends. An error is sent to the parent and ends the process with 1."""
    channel = Channel()
    try:
        messages = iter(channel)
        start = next(messages, None)
        if isinstance(start, Start):
            _ROLES[start.role](start, messages, channel.send)
    except BrokenPipeError:
        sys.exit(1)  # The parent is gone, and so is the reader of any report.
    except Exception as error:
        channel.send(Failed(error=type(error).__name__, message=str(error)))
        raise


def _convert(start: Start, messages: Iterator[ToWorker], send: Callable[[FromWorker], None]) -> None:
    send(Stage(f"converting {Path(start.model).name}, once"))
    gguf = Path(start.model)
    directory, _ = find_model(gguf)
    convert(gguf, directory)
    send(Converted())


def _load(start: Start, send: Callable[[FromWorker], None]) -> LanguageModel:
    send(Stage("loading the model"))
    language_model = LanguageModel.load(Path(start.model), threads=start.threads)
    send(Loaded(pid=os.getpid(), max_positions=language_model.max_positions))
    return language_model


_ROLES: dict[str, Callable[[Start, Iterator[ToWorker], Callable[[FromWorker], None]], None]] = {
    "convert": _convert,
    "reference": lambda start, messages, send: run_reference(_load(start, send), messages, send),
    "prefill": lambda start, messages, send: run_prefill(start.name, _load(start, send), messages, send),
    "decode": lambda start, messages, send: run_decode(start.name, _load(start, send), messages, send),
}
