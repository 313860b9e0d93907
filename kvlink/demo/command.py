"""``kvlink demo`` on the command line."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvlink.errors import ConfigError, KvlinkError

if TYPE_CHECKING:
    from kvlink.demo.display import Display
    from kvlink.demo.rows import Row
    from kvlink.demo.run import DemoOptions

__all__ = ["demo"]

#: The lanes that UCX moves bytes on; the demo hands over on one of them in any case.
_UCX_LANES = ("get", "staged")
_LANES = ("auto", "mapped", "vectored", *_UCX_LANES)
_EXIT_TOKENS_DIFFER = 3


def demo(
    *,
    prompt: Annotated[str | None, typer.Option(help="What to ask; also the question about --file.")] = None,
    file: Annotated[Path | None, typer.Option(help="A document to put before the question.")] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Another model, in the format of transformers.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, max=1000, help="How many prompts to answer.")] = 1,
    prefill: Annotated[int, typer.Option(min=1, max=64, help="Prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(min=1, max=64, help="Decode workers.")] = 1,
    lane: Annotated[str, typer.Option(help="auto, mapped, vectored, get or staged.")] = "auto",
    max_new_tokens: Annotated[int, typer.Option(min=1, max=100_000, help="Longest answer, in tokens.")] = 48,
    corrupt: Annotated[bool, typer.Option("--corrupt", help="Damage one block in flight: must exit with 3.")] = False,
    json: Annotated[str, typer.Option(metavar="PATH", help="Write the rows as JSON; - is standard output.")] = "",
) -> None:
    """Prefill a real model in one process, decode in another, and compare with doing both in one.

    Each request is handed over twice, on LANE and on a lane of UCX. Exits with 0 if every answer
    has the tokens of the reference, with 3 if only that comparison failed, and with 1 on any other error.
    """
    try:
        options = _options(
            prompts=_prompts(prompt, file, requests),
            model=model,
            workers=(prefill, decode),
            lane=lane,
            max_new_tokens=max_new_tokens,
            corrupt=corrupt,
        )
        same = _run(options, json=json)
    except (KvlinkError, OSError) as error:
        typer.echo(f"kvlink demo: {error}", err=True)
        raise typer.Exit(1) from None
    if not same:
        raise typer.Exit(_EXIT_TOKENS_DIFFER)


def _prompts(prompt: str | None, file: Path | None, requests: int) -> list[str]:
    from kvlink.demo.prompts import make_prompts

    return make_prompts(prompt=prompt, file=file, count=requests)


def _options(
    *, prompts: list[str], model: Path | None, workers: tuple[int, int], lane: str, max_new_tokens: int, corrupt: bool
) -> DemoOptions:
    from kvlink.demo.run import DemoOptions
    from kvlink.demo.weights import find_gguf, require_packages

    if lane not in _LANES:
        raise ConfigError(f"--lane {lane!r} is none of {', '.join(_LANES)}")
    if corrupt and max_new_tokens < 2:
        raise ConfigError("--corrupt needs --max-new-tokens 2 or more: the first token comes from the prefill")
    require_packages("torch", "transformers", "safetensors")
    if model is None:
        require_packages("gguf", "accelerate")
        source = find_gguf()
    elif not (model / "config.json").is_file():
        raise ConfigError(f"load the model from {model}: there is no config.json in it")
    else:
        source = model.absolute()
    # On UCX lanes already: the same one again, since the other may not be usable (get is not, over TCP).
    second = (lane,) if lane in _UCX_LANES else _UCX_LANES
    return DemoOptions(
        model=source,
        prompts=tuple(prompts),
        prefill_count=workers[0],
        decode_count=workers[1],
        lanes=(() if lane == "auto" else (lane,), second),
        max_new_tokens=max_new_tokens,
        corrupt=corrupt,
        threads=_threads(sum(workers)),
    )


def _threads(workers: int) -> int:
    """Return threads for each worker: all work at once, and sums must not depend on who is busy."""
    return max(1, min(8, len(os.sched_getaffinity(0)) // workers))


def _run(options: DemoOptions, *, json: str) -> bool:
    """Run, print and write; return whether every answer had the tokens of the reference."""
    from kvlink.demo.display import Display
    from kvlink.demo.run import DemoRun
    from kvlink.report import write_report

    display = Display(file=sys.stderr if json == "-" else sys.stdout)
    with display, DemoRun(options, display) as run:
        rows = run.run()
    display.show_table(rows)
    if json:
        write_report(json, rows)
    return _judge(rows, options, display)


def _judge(rows: list[Row], options: DemoOptions, display: Display) -> bool:
    from kvlink.demo.rows import describe_difference

    if not all(row["every_decode_forward_took_one_token"] for row in rows):
        raise KvlinkError(
            "a decode worker computed more than one token at once: it did not start from the handed-over KV"
        )
    wrong = [row for row in rows if not row["same_tokens"]]
    if options.corrupt and not wrong:
        raise KvlinkError("a block was damaged and the tokens are the same: raise --max-new-tokens")
    for row in wrong:
        display.verdict(describe_difference(row), is_good=False)
    if not wrong:
        display.verdict(f"All {len(rows)} handoffs gave the tokens of the reference.", is_good=True)
    return not wrong
