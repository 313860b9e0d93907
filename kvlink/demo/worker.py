"""The inside of a worker process: a loop over messages that arrive on standard input."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvlink.demo.channel import Channel
from kvlink.demo.decode_worker import run_decode
from kvlink.demo.messages import Converted, Failed, Loaded, Stage, Start
from kvlink.demo.model import LanguageModel
from kvlink.demo.prefill_worker import run_prefill
from kvlink.demo.pushing_worker import run_pushing
from kvlink.demo.reference_worker import run_reference
from kvlink.demo.serving_worker import run_serving
from kvlink.demo.weights import convert, find_model

__all__ = ["main"]


def main() -> int:
    """Run one worker until its input ends, and return its exit code. An error is printed and sent to the parent."""
    channel = Channel()
    try:
        start = next(iter(channel), None)
        if isinstance(start, Start):
            _ROLES[start.role](start, channel)
    except BrokenPipeError:
        return 1  # The parent is gone, and so is the reader of any report.
    except Exception as error:  # noqa: BLE001 - the top of the process
        traceback.print_exc()
        with suppress(BrokenPipeError):
            channel.send(Failed(error=type(error).__name__, message=str(error)))
        return 1
    return 0


def _convert(start: Start, channel: Channel) -> None:
    gguf = Path(start.model)
    channel.send(Stage(f"converting {gguf.name}, once"))
    directory, _ = find_model(gguf)
    convert(gguf, directory)
    channel.send(Converted())


def _load(start: Start, channel: Channel) -> LanguageModel:
    channel.send(Stage("loading the model"))
    language_model = LanguageModel.load(Path(start.model), threads=start.threads)
    channel.send(Loaded(pid=os.getpid(), max_positions=language_model.max_positions))
    return language_model


_ROLES: dict[str, Callable[[Start, Channel], None]] = {
    "convert": _convert,
    "reference": lambda start, channel: run_reference(_load(start, channel), channel),
    "prefill": lambda start, channel: run_prefill(start.name, _load(start, channel), channel),
    "decode": lambda start, channel: run_decode(start.name, _load(start, channel), channel),
    "pushing": lambda start, channel: run_pushing(start.name, _load(start, channel), channel),
    "serving": lambda start, channel: run_serving(start.name, _load(start, channel), channel),
}
