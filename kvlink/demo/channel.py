"""A worker's end of the two pipes to the parent."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec

from kvlink.demo.messages import FromWorker, ToWorker

__all__ = ["Channel"]


class Channel:
    """Messages from the parent on standard input, messages to it on standard output.

    Whatever else prints to standard output goes to standard error from here on: the pipe
    carries messages only. Any thread may send; one thread at a time may iterate.
    """

    def __init__(self) -> None:
        self._input = os.fdopen(os.dup(0), "rb")
        self._output = os.dup(1)
        os.dup2(2, 1)
        self._decoder: msgspec.json.Decoder[ToWorker] = msgspec.json.Decoder(ToWorker)

    def __iter__(self) -> Iterator[ToWorker]:
        """Yield messages until the parent closes the pipe or is gone."""
        for line in self._input:
            yield self._decoder.decode(line)

    def send(self, message: FromWorker) -> None:
        """Send one message to the parent.

        Raises
        ------
        BrokenPipeError
            If the parent is gone.
        """
        line = memoryview(msgspec.json.encode(message) + b"\n")
        while line:
            line = line[os.write(self._output, line) :]
