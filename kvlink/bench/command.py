"""The command line of the benchmarks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvlink.bench.transfer import Row

__all__ = ["app"]

app = typer.Typer(help="Measure on this machine. Bytes are verified; every number stands next to a limit.")

_COLUMNS = (
    "lane",
    "block",
    "GB/s",
    "min",
    "max",
    "post\nus",
    "CPU s/GB\nsource",
    "CPU s/GB\ntarget",
    "memcpy\nGB/s",
    "ratio",
)


@app.callback()
def bench() -> None:
    """Measure on this machine. Bytes are verified; every number stands next to a limit."""


@app.command()
def transfer(
    *,
    block_bytes: Annotated[str, typer.Option(help="Contiguous bytes a block, several by commas.")] = (
        "4KiB,16KiB,64KiB,256KiB,1MiB"
    ),
    total_bytes: Annotated[str, typer.Option(help="Bytes moved in one repetition.")] = "256MiB",
    lane: Annotated[str, typer.Option(help="auto, mapped, vectored, get, staged; several by commas.")] = "auto",
    threads: Annotated[int, typer.Option(min=1, help="Copy threads of each process.")] = 1,
    repeat: Annotated[int, typer.Option(min=1, help="Repetitions a row, after one warm-up.")] = 7,
    memory: Annotated[str, typer.Option(help="kvlink: allocated by kvlink.empty; foreign: by anyone else.")] = "kvlink",
    json: Annotated[str, typer.Option(metavar="PATH", help="Write the rows as JSON; - is standard output.")] = "",
) -> None:
    """Move scattered blocks between two processes, next to one thread of memcpy over the same blocks.

    Each repetition is a whole handoff: from the call of pull until the source has confirmed it.
    """
    from rich.progress import track

    from kvlink.bench.scattered import Geometry
    from kvlink.bench.sizes import parse_size
    from kvlink.bench.transfer import Setting, measure
    from kvlink.errors import InvalidArgument
    from kvlink.report import write_report

    if memory not in ("kvlink", "foreign"):
        raise InvalidArgument(f"memory is {memory!r}, neither kvlink nor foreign")
    settings = [
        Setting(
            geometry=Geometry(block_bytes=parse_size(size), total_bytes=parse_size(total_bytes)),
            lane=one_lane.strip(),
            memory=memory,
            threads=threads,
            repeat=repeat,
        )
        for one_lane in lane.split(",")
        for size in block_bytes.split(",")
    ]
    quiet = json == "-"
    rows = [measure(setting) for setting in track(settings, "measuring", disable=quiet, transient=True)]
    if json:
        write_report(json, rows)
    if not all(row["verified"] for row in rows):
        typer.echo("kvlink bench: the target does not hold what the source offered", err=True)
        raise typer.Exit(1)
    if not quiet:
        _print(rows)


def _print(rows: list[Row]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from kvlink.bench.sizes import format_size

    first = rows[0]
    table = Table(
        title=f"Handoffs of scattered blocks: memory {first['memory']}, copy threads a side {first['threads']}",
        caption="Medians; the ratio is to one thread of memcpy over the same blocks. Every byte was verified.",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column == "lane" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["lane"],
            format_size(row["block_bytes"]),
            f"{row['gbps_median']:.2f}",
            f"{row['gbps_min']:.2f}",
            f"{row['gbps_max']:.2f}",
            f"{row['post_us_median']:.0f}",
            f"{row['cpu_s_per_gb_source']:.2f}",
            f"{row['cpu_s_per_gb_target']:.2f}",
            f"{row['memcpy_gbps']:.2f}",
            f"{row['ratio_to_memcpy']:.2f}",
        )
    Console().print(table)
