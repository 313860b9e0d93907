"""What the demo shows a person: progress while models load, answers as they come, tables at the end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import IO, TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kvlink.demo.messages import Pulled, Token
from kvlink.demo.rows import Row
from kvlink.demo.table import make_table

if TYPE_CHECKING:
    from kvlink.demo.run import DemoOptions

__all__ = ["Display"]

_SHOWN_CHARACTERS = 300


class Display:
    """Writes to a terminal, or plainly to a file. A context manager, so that the terminal is left clean."""

    def __init__(self, *, file: IO[str]) -> None:
        self._console = Console(file=file, highlight=False)
        self._progress = Progress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}"),
            TextColumn("{task.fields[stage]}", style="dim"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._started_s = time.perf_counter()
        self._streams_tokens = False

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def stage(self, worker: str, text: str) -> None:
        """Show what a worker is busy with."""
        if worker not in self._tasks:
            self._tasks[worker] = self._progress.add_task(worker, total=1, stage=text)
        self._progress.update(self._tasks[worker], stage=text)

    def ready(self, worker: str) -> None:
        """Show that a worker has come up, or that the reference has all its answers."""
        self._progress.update(self._tasks[worker], stage="ready", completed=1)
        if not self._console.is_terminal:
            self._console.print(f"{worker}: ready after {time.perf_counter() - self._started_s:.1f} s")

    def begin_answers(self, options: DemoOptions) -> None:
        """End the progress display; from here on lines are printed."""
        self._progress.stop()
        self._streams_tokens = len(options.prompts) == 1
        if self._streams_tokens:
            self._print(_shortened(options.prompts[0]), style="dim")

    def pulled(self, message: Pulled) -> None:
        """Say so if a block was damaged after it arrived."""
        if message.corrupted_block is not None:
            self._print(f"damaged block {message.corrupted_block} between the pull and the decode", style="red")

    def token(self, message: Token) -> None:
        """Show the text of a token at once, if there is only one answer to show."""
        if self._streams_tokens and message.handoff.round == 0:
            self._console.print(Text(message.text), end="", soft_wrap=True)

    def decoded(self, row: Row, *, is_first: bool) -> None:
        """Show a complete answer, unless it was shown when the request was handed over first, and how it compares."""
        if is_first and self._streams_tokens:
            self._console.print()
        elif is_first:
            self._print(_shortened(row["text"]), style="")
        verdict = "the reference's tokens" if row["same_tokens"] else "NOT the reference's tokens"
        self._print(
            f"  request {row['request']}: {row['prefill_worker']} -> {row['decode_worker']} on {row['lane']}, "
            f"{row['new_tokens']} tokens, {verdict}",
            style="green" if row["same_tokens"] else "red",
        )

    def show_table(self, rows: Sequence[Row]) -> None:
        """Print the numbers of all handoffs."""
        self.show(make_table(rows))

    def show(self, table: Table) -> None:
        """Print a table."""
        self._console.print(table)

    def verdict(self, text: str, *, is_good: bool) -> None:
        """Print the last line."""
        self._print(text, style="bold green" if is_good else "bold red")

    def _print(self, text: str, *, style: str) -> None:
        self._console.print(Text(text, style=style), soft_wrap=True)


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]} ... ({len(text)} characters)"
