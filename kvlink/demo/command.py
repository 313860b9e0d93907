"""``kvlink demo`` on the command line."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvlink.errors import ConfigError, KvlinkError
from kvlink.report import check_path

if TYPE_CHECKING:
    from kvlink.demo.display import Display
    from kvlink.demo.rows import Row
    from kvlink.demo.run import DemoOptions

__all__ = ["demo"]

#: The lanes that UCX moves bytes on; the demo hands over on one of them in any case.
_UCX_LANES = ("get", "staged")
_LANES = ("auto", "mapped", "vectored", *_UCX_LANES)
_EXIT_TOKENS_DIFFER = 3
# Of --compare and --push: documents of about 1,500 and 2,000 tokens; as many tokens a chunk as engines take.
_DOCUMENT_ENTRIES = 50
_PUSHED_ENTRIES = 66
_CHUNK_TOKENS = 256
_REPEAT = 5


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
    compare: Annotated[
        bool, typer.Option("--compare", help="Show what splitting is for: how long others wait for a long document.")
    ] = False,
    push: Annotated[
        bool, typer.Option("--push", help="Show what pushing layer by layer saves, while prefill computes.")
    ] = False,
    json: Annotated[
        str, typer.Option(metavar="PATH", callback=check_path, help="Write the rows as JSON; - is standard output.")
    ] = "",
) -> None:
    """Prefill a real model in one process, decode in another, and compare with doing both in one.

    Each request is handed over twice, on LANE and on a lane of UCX. Exits with 0 if every answer
    has the tokens of the reference, with 3 if only that comparison failed, and with 1 on any other error.
    """
    try:
        _check_together(compare=compare, push=push, has_own=corrupt or (prefill, decode) != (1, 1))
        if compare:
            _compare(document=(prompt, file), model=model, others=requests, lane=lane, json=json)
            return
        if push:
            same = _push(document=(prompt, file), model=model, lane=lane, max_new_tokens=max_new_tokens, json=json)
        else:
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


def _check_together(*, compare: bool, push: bool, has_own: bool) -> None:
    if compare and push:
        raise ConfigError("--compare and --push are two demonstrations: run one after the other")
    if (compare or push) and has_own:
        raise ConfigError("--compare and --push have workers of their own: leave out --prefill, --decode and --corrupt")


def _prompts(prompt: str | None, file: Path | None, requests: int) -> list[str]:
    from kvlink.demo.prompts import make_prompts

    return make_prompts(prompt=prompt, file=file, count=requests)


def _options(
    *, prompts: list[str], model: Path | None, workers: tuple[int, int], lane: str, max_new_tokens: int, corrupt: bool
) -> DemoOptions:
    from kvlink.demo.run import DemoOptions

    _check_lane(lane)
    if corrupt and max_new_tokens < 2:
        raise ConfigError("--corrupt needs --max-new-tokens 2 or more: the first token comes from the prefill")
    # On UCX lanes already: the same one again, since the other may not be usable (get is not, over TCP).
    second = (lane,) if lane in _UCX_LANES else _UCX_LANES
    return DemoOptions(
        model=_source_of(model),
        prompts=tuple(prompts),
        prefill_count=workers[0],
        decode_count=workers[1],
        lanes=(() if lane == "auto" else (lane,), second),
        max_new_tokens=max_new_tokens,
        corrupt=corrupt,
        threads=_threads(sum(workers)),
    )


def _check_lane(lane: str) -> None:
    if lane not in _LANES:
        raise ConfigError(f"--lane {lane!r} is none of {', '.join(_LANES)}")


def _source_of(model: Path | None) -> Path:
    """Return what to load: a directory, or the GGUF file of the package."""
    from kvlink.demo.weights import find_gguf, require_packages

    require_packages("torch", "transformers", "safetensors")
    if model is None:
        require_packages("gguf", "accelerate")
        return find_gguf()
    if not (model / "config.json").is_file():
        raise ConfigError(f"load the model from {model}: there is no config.json in it")
    return model.absolute()


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


def _compare(
    *, document: tuple[str | None, Path | None], model: Path | None, others: int, lane: str, json: str
) -> None:
    """Run ``--compare``: print and write how long the others stalled."""
    from kvlink.demo.compare import CompareOptions, compare, default_threads
    from kvlink.demo.display import Display
    from kvlink.demo.prompts import make_document
    from kvlink.demo.table import make_comparison
    from kvlink.report import write_report

    _check_lane(lane)
    prompt, file = document
    given = prompt is not None or file is not None
    options = CompareOptions(
        model=_source_of(model),
        document=_prompts(prompt, file, 1)[0] if given else make_document(entries=_DOCUMENT_ENTRIES),
        others=tuple(_prompts(None, None, max(2, others))),
        lane=lane,
        threads=default_threads(),
        chunk_tokens=_CHUNK_TOKENS,
        repeat=_REPEAT,
    )
    display = Display(file=sys.stderr if json == "-" else sys.stdout)
    with display:
        rows = compare(options, display)
    display.show(make_comparison(rows))
    if json:
        write_report(json, rows)


def _push(
    *, document: tuple[str | None, Path | None], model: Path | None, lane: str, max_new_tokens: int, json: str
) -> bool:
    """Run ``--push``: print and write what was saved; return whether both ways gave the same tokens."""
    from kvlink.demo.display import Display
    from kvlink.demo.prompts import make_document
    from kvlink.demo.push import PushOptions, push
    from kvlink.demo.table import make_pushes
    from kvlink.report import write_report

    _check_lane(lane)
    prompt, file = document
    given = prompt is not None or file is not None
    options = PushOptions(
        model=_source_of(model),
        prompts=(
            _prompts(prompt, file, 1)[0] if given else make_document(entries=_PUSHED_ENTRIES),
            *_prompts(None, None, 1),
        ),
        lane=lane,
        threads=_threads(2),
        max_new_tokens=max_new_tokens,
        repeat=_REPEAT,
    )
    display = Display(file=sys.stderr if json == "-" else sys.stdout)
    with display:
        rows = push(options, display)
    display.show(make_pushes(rows))
    if json:
        write_report(json, rows)
    return all(row["same_tokens"] for row in rows)
