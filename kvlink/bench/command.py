"""The command line of the benchmarks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvlink.bench.fan import FanRow, Shape
    from kvlink.bench.handoff import HandoffRow
    from kvlink.bench.idle import IdleRow
    from kvlink.bench.layouts import LayoutRow
    from kvlink.bench.planning import PlanRow
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


_LAYOUT_COLUMNS = ("pair", "lane", "run", "runs", "GB/s", "min", "max", "memcpy\nGB/s", "ratio")

_PLAN_COLUMNS = ("blocks", "regions", "runs", "median\nus", "min", "max", "check", "plan", "post")

_HANDOFF_COLUMNS = (
    "lane",
    "blocks",
    "block",
    "at once",
    "handoffs",
    "p50\nus",
    "p99\nus",
    "GB/s",
    "one large\nGB/s",
    "ratio",
)

_FAN_COLUMNS = ("lane", "peers", "block", "GB/s\nof all", "one to one\nGB/s", "ratio", "slowest\nto mean")

_IDLE_COLUMNS = ("role", "peers", "CPU\n% of a core", "RSS\na peer", "descriptors\na peer", "threads")

_Threads = Annotated[int, typer.Option(min=1, help="Copy threads of each process.")]
_TotalBytes = Annotated[str, typer.Option(help="Bytes moved in one repetition.")]
_Repeat = Annotated[int, typer.Option(min=1, help="Repetitions a row, after warming up.")]
_Json = Annotated[str, typer.Option(metavar="PATH", help="Write the rows as JSON; - is standard output.")]


@app.callback()
def bench() -> None:
    """Measure on this machine. Bytes are verified; every number stands next to a limit."""


@app.command()
def transfer(
    *,
    block_bytes: Annotated[str, typer.Option(help="Contiguous bytes a block, several by commas.")] = (
        "4KiB,16KiB,64KiB,256KiB,1MiB"
    ),
    total_bytes: _TotalBytes = "256MiB",
    lane: Annotated[str, typer.Option(help="auto, mapped, vectored, get, staged; several by commas.")] = "auto",
    threads: _Threads = 1,
    repeat: _Repeat = 7,
    memory: Annotated[str, typer.Option(help="kvlink: allocated by kvlink.empty; foreign: by anyone else.")] = "kvlink",
    json: _Json = "",
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


@app.command()
def layout(
    *,
    pair: Annotated[str, typer.Option(help="all, or the names of pairs by commas.")] = "all",
    total_bytes: _TotalBytes = "256MiB",
    lane: Annotated[str, typer.Option(help="auto, mapped, vectored, get or staged.")] = "mapped",
    threads: _Threads = 1,
    repeat: _Repeat = 7,
    json: _Json = "",
) -> None:
    """Hand over between ranks of unlike layouts in two processes, next to one thread of memcpy over the same runs.

    Pairs: same (the control), tp2-tp4, tp4-tp2, block16-block64, block64-block16 and hnd-nhd, all with 8 heads of 128
    in bfloat16.
    """
    from rich.progress import track

    from kvlink.bench.layouts import LayoutSetting, measure_layout
    from kvlink.bench.ranks import PAIRS
    from kvlink.bench.sizes import parse_size
    from kvlink.report import write_report

    settings = [
        LayoutSetting(pair=name.strip(), total_bytes=parse_size(total_bytes), lane=lane, threads=threads, repeat=repeat)
        for name in (PAIRS if pair == "all" else pair.split(","))
    ]
    quiet = json == "-"
    rows = [measure_layout(setting) for setting in track(settings, "measuring", disable=quiet, transient=True)]
    if json:
        write_report(json, rows)
    if not all(row["verified"] for row in rows):
        typer.echo("kvlink bench: the target does not hold what the source offered", err=True)
        raise typer.Exit(1)
    if not quiet:
        _print_layouts(rows)


@app.command()
def handoff(
    *,
    blocks: Annotated[str, typer.Option(help="Blocks of one handoff, several by commas.")] = "1,128",
    block_bytes: Annotated[str, typer.Option(help="Bytes of a block, K and V together.")] = "32KiB",
    concurrent: Annotated[str, typer.Option(help="Handoffs at once, several by commas.")] = "1,64",
    lane: Annotated[str, typer.Option(help="auto, mapped, vectored, get or staged.")] = "auto",
    threads: _Threads = 1,
    handoffs: Annotated[int, typer.Option(min=1, help="Handoffs a row where one is under way at once.")] = 300,
    repeat: _Repeat = 7,
    busy: Annotated[bool, typer.Option(help="Keep one core busy with something else meanwhile.")] = False,
    json: _Json = "",
) -> None:
    """Time handoffs between two processes: from an offer that the target knows until it has seen the outcome.

    Handoffs at once stand next to one large handoff of the same blocks, in turn.
    """
    from rich.progress import track

    from kvlink.bench.handoff import HandoffSetting, measure_handoffs
    from kvlink.bench.sizes import parse_numbers, parse_size
    from kvlink.report import write_report

    settings = [
        HandoffSetting(
            blocks=count,
            block_bytes=parse_size(block_bytes),
            concurrent=at_once,
            rounds=handoffs if at_once == 1 else repeat,
            lane=lane,
            threads=threads,
            busy=busy,
        )
        for count in parse_numbers(blocks)
        for at_once in parse_numbers(concurrent)
    ]
    quiet = json == "-"
    rows = [measure_handoffs(setting) for setting in track(settings, "measuring", disable=quiet, transient=True)]
    if json:
        write_report(json, rows)
    if not all(row["verified"] for row in rows):
        typer.echo("kvlink bench: the target does not hold what the source offered", err=True)
        raise typer.Exit(1)
    if not quiet:
        _print_handoffs(rows)


_Peers = Annotated[str, typer.Option(help="Nodes on the side that has many, several by commas.")]
_FanLane = Annotated[str, typer.Option(help="auto, mapped, vectored, get or staged.")]
_FanBlock = Annotated[str, typer.Option(help="Bytes of a block, K and V together.")]


@app.command()
def fanout(
    *,
    peers: _Peers = "1,4,16",
    block_bytes: _FanBlock = "64KiB",
    total_bytes: _TotalBytes = "128MiB",
    lane: _FanLane = "auto",
    threads: _Threads = 1,
    repeat: _Repeat = 7,
    json: _Json = "",
) -> None:
    """Let many nodes read from one at once, next to one that reads as much."""
    _fan("fanout", peers, block_bytes, total_bytes, lane=lane, threads=threads, repeat=repeat, json=json)


@app.command()
def incast(
    *,
    peers: _Peers = "1,4,16",
    block_bytes: _FanBlock = "64KiB",
    total_bytes: _TotalBytes = "128MiB",
    lane: _FanLane = "auto",
    threads: _Threads = 1,
    repeat: _Repeat = 7,
    json: _Json = "",
) -> None:
    """Let one node read from many at once, next to reading as much from one."""
    _fan("incast", peers, block_bytes, total_bytes, lane=lane, threads=threads, repeat=repeat, json=json)


def _fan(
    shape: Shape,
    peers: str,
    block_bytes: str,
    total_bytes: str,
    *,
    lane: str,
    threads: int,
    repeat: int,
    json: str,
) -> None:
    from kvlink.bench.fan import FanSetting, measure_fan
    from kvlink.bench.sizes import parse_numbers, parse_size
    from kvlink.report import write_report

    rows = [
        measure_fan(
            FanSetting(
                shape=shape,
                peers=count,
                block_bytes=parse_size(block_bytes),
                total_bytes=parse_size(total_bytes),
                lane=lane,
                threads=threads,
                repeat=repeat,
            )
        )
        for count in parse_numbers(peers)
    ]
    if json:
        write_report(json, rows)
    if not all(row["verified"] for row in rows):
        typer.echo("kvlink bench: a target does not hold what its source offered", err=True)
        raise typer.Exit(1)
    if json != "-":
        _print_fans(rows)


@app.command()
def idle(
    *,
    peers: Annotated[int, typer.Option(min=1, max=4000, help="Nodes that one node is connected to.")] = 320,
    seconds: Annotated[float, typer.Option(min=0.1, max=600, help="How long nothing happens.")] = 10.0,
    lane: Annotated[str, typer.Option(help="auto, mapped, vectored, get or staged: how they read before that.")] = (
        "auto"
    ),
    json: _Json = "",
) -> None:
    """Measure what a connected peer costs a node that has nothing to do. The peers live in four processes."""
    from kvlink.bench.idle import IdleSetting, measure_idle
    from kvlink.report import write_report

    rows = measure_idle(IdleSetting(peers=peers, seconds=seconds, lane=lane))
    if json:
        write_report(json, rows)
    if json != "-":
        _print_idle(rows)


@app.command()
def plan(
    *,
    size: Annotated[str, typer.Option(help="Blocks x regions, several by commas.")] = "4096x64,128x64",
    repeat: _Repeat = 51,
    json: _Json = "",
) -> None:
    """Plan requests of scattered blocks and hand every copy to a lane that only counts: no bytes move."""
    from kvlink.bench.planning import PlanSetting, measure_plan
    from kvlink.bench.sizes import parse_counts
    from kvlink.report import write_report

    settings = []
    for one_size in size.split(","):
        blocks, regions = parse_counts(one_size)
        settings.append(PlanSetting(blocks=blocks, regions=regions, repeat=repeat))
    rows = [measure_plan(setting) for setting in settings]
    if json:
        write_report(json, rows)
    if json != "-":
        _print_plans(rows)


def _print(rows: list[Row]) -> None:
    from kvlink.bench.sizes import format_size

    first = rows[0]
    cells = [
        (
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
        for row in rows
    ]
    _print_table(
        f"Handoffs of scattered blocks: memory {first['memory']}, copy threads a side {first['threads']}",
        _COLUMNS,
        cells,
        caption="Medians; the ratio is to one thread of memcpy over the same blocks. Every byte was verified.",
    )


def _print_layouts(rows: list[LayoutRow]) -> None:
    from kvlink.bench.sizes import format_size

    cells = [
        (
            row["pair"],
            row["lane"],
            format_size(row["run_bytes"]),
            f"{row['runs']:,}",
            f"{row['gbps_median']:.2f}",
            f"{row['gbps_min']:.2f}",
            f"{row['gbps_max']:.2f}",
            f"{row['memcpy_gbps']:.2f}",
            f"{row['ratio_to_memcpy']:.2f}",
        )
        for row in rows
    ]
    _print_table(
        f"Handoffs between unlike layouts: copy threads a side {rows[0]['threads']}",
        _LAYOUT_COLUMNS,
        cells,
        caption="Medians; the ratio is to one thread of memcpy over the same runs. Every element was verified.",
    )


def _print_plans(rows: list[PlanRow]) -> None:
    cells = [
        (
            f"{row['blocks']:,}",
            f"{row['regions']:,}",
            f"{row['runs']:,}",
            f"{row['request_to_last_post_us_median']:.0f}",
            f"{row['request_to_last_post_us_min']:.0f}",
            f"{row['request_to_last_post_us_max']:.0f}",
            f"{row['check_us_median']:.0f}",
            f"{row['plan_us_median']:.0f}",
            f"{row['post_us_median']:.0f}",
        )
        for row in rows
    ]
    _print_table("From a request to its last post, with a lane that only counts", _PLAN_COLUMNS, cells, caption=None)


def _print_handoffs(rows: list[HandoffRow]) -> None:
    from kvlink.bench.sizes import format_size

    cells = [
        (
            row["lane"],
            f"{row['blocks']:,}",
            format_size(row["block_bytes"]),
            f"{row['concurrent']:,}",
            f"{row['handoffs']:,}",
            f"{row['p50_us']:.0f}",
            f"{row['p99_us']:.0f}",
            f"{row['gbps']:.2f}",
            f"{row['gbps_one_large']:.2f}",
            f"{row['ratio_to_one_large']:.2f}",
        )
        for row in rows
    ]
    busy = ", with one core busy" if rows[0]["busy"] else ""
    _print_table(
        f"Handoffs from a known offer to the outcome: copy threads a side {rows[0]['threads']}{busy}",
        _HANDOFF_COLUMNS,
        cells,
        caption="The ratio is to one handoff of all blocks at once, in turn. Every byte was verified.",
    )


def _print_fans(rows: list[FanRow]) -> None:
    from kvlink.bench.sizes import format_size

    cells = [
        (
            row["lane"],
            f"{row['peers']}",
            format_size(row["block_bytes"]),
            f"{row['gbps']:.2f}",
            f"{row['gbps_one_to_one']:.2f}",
            f"{row['ratio_to_one_to_one']:.2f}",
            f"{row['slowest_to_mean']:.2f}",
        )
        for row in rows
    ]
    many = "1 to many" if rows[0]["shape"] == "fanout" else "many to 1"
    _print_table(
        f"Handoffs at once, {many}: {format_size(rows[0]['total_bytes'])} in all, copy threads {rows[0]['threads']}",
        _FAN_COLUMNS,
        cells,
        caption="Medians; the ratio is to one handoff of as many bytes, in turn. Every byte was verified.",
    )


def _print_idle(rows: list[IdleRow]) -> None:
    cells = [
        (
            row["role"],
            f"{row['peers']:,}",
            f"{row['cpu_percent']:.2f}",
            f"{row['rss_bytes_per_peer'] / 1024:.0f}KiB",
            f"{row['descriptors_per_peer']:.1f}",
            f"{row['threads']}",
        )
        for row in rows
    ]
    _print_table(f"A node with nothing to do for {rows[0]['seconds']:.0f} s", _IDLE_COLUMNS, cells, caption=None)


def _print_table(title: str, columns: Sequence[str], cells: Iterable[tuple[str, ...]], *, caption: str | None) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in ("lane", "pair", "role") else "right", no_wrap=True)
    for row in cells:
        table.add_row(*row)
    Console().print(table)
