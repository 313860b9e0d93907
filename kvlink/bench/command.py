"""The command line of the benchmarks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvlink.bench.page import check_page
from kvlink.report import check_path

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvlink.bench.fan import Shape
    from kvlink.bench.systems import Setting
    from kvlink.bench.tables import Table

__all__ = ["app"]

app = typer.Typer(help="Measure on this machine. Bytes are verified; every number stands next to a limit.")

_Threads = Annotated[int, typer.Option(min=1, help="Copy threads of each process.")]
_TotalBytes = Annotated[str, typer.Option(help="Bytes moved in one repetition.")]
_Repeat = Annotated[int, typer.Option(min=1, help="Repetitions a row, after warming up.")]
_Report = Annotated[
    str, typer.Option(metavar="PATH", callback=check_page, help="Write one HTML page with plots. Needs kvlink[bench].")
]
_Json = Annotated[
    str, typer.Option(metavar="PATH", callback=check_path, help="Write the rows as JSON; - is standard output.")
]


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
    peers: Annotated[
        str, typer.Option(help="Systems in turn: kvlink,memcpy,socket,ucx,ucxx,nixl,nixl-default,mooncake.")
    ] = "kvlink",
    serve: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Offer blocks to the other host, until interrupted.")
    ] = "",
    advertise: Annotated[str, typer.Option(metavar="HOST", help="With --serve: what others should connect to.")] = "",
    connect: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Pull from the host that serves there, and report.")
    ] = "",
    secret_file: Annotated[
        str, typer.Option(metavar="PATH", help="The secret of both hosts; else it is that of KVLINK_SECRET.")
    ] = "",
    json: _Json = "",
    report: _Report = "",
) -> None:
    """Move scattered blocks between two processes, next to one thread of memcpy over the same blocks.

    Each repetition is a whole handoff: from the call of pull until the source has confirmed it. With --peers other
    systems move the same blocks in turn; all but memcpy and socket need `make peers`. With --serve on one host and
    --connect on another, the blocks go between these two.
    """
    if serve:
        _serve(serve, secret_file=secret_file, advertise=advertise)
        return
    from kvlink.bench import tables
    from kvlink.bench.choice import parse_systems

    names = parse_systems(peers)
    systems = _remote(connect, names, secret_file=secret_file) if connect else _systems(names)
    settings = _transfer_settings(
        block_bytes, lane, total_bytes=total_bytes, memory=memory, threads=threads, repeat=repeat
    )
    rows = _measure(systems, settings, quiet=json == "-")
    chosen = [row for of_setting in rows for row in of_setting if row["system"] in names]
    _tell(chosen, tables.COMPARED if len(names) > 1 else tables.TRANSFER, json, report)


@app.command()
def layout(
    *,
    pair: Annotated[str, typer.Option(help="all, or the names of pairs by commas.")] = "all",
    against: Annotated[str, typer.Option(help="A pair to run beside each, for the ratio of their speeds.")] = "",
    total_bytes: _TotalBytes = "256MiB",
    lane: Annotated[str, typer.Option(help="auto, mapped, vectored, get or staged.")] = "mapped",
    threads: _Threads = 1,
    repeat: _Repeat = 7,
    json: _Json = "",
    report: _Report = "",
) -> None:
    """Hand over between ranks of unlike layouts in two processes, next to one thread of memcpy over the same runs.

    Pairs: same and same-64KiB (the controls), tp2-tp4, tp4-tp2, block16-block64, block64-block16 and hnd-nhd, all with
    8 heads of 128 in bfloat16.
    """
    from kvlink.bench import tables
    from kvlink.bench.layouts import LayoutSetting, measure_layout
    from kvlink.bench.ranks import PAIRS
    from kvlink.bench.sizes import parse_size

    settings = [
        LayoutSetting(
            pair=name.strip(),
            total_bytes=parse_size(total_bytes),
            lane=lane,
            threads=threads,
            repeat=repeat,
            against=against,
        )
        for name in (PAIRS if pair == "all" else pair.split(","))
    ]
    rows = _measure(measure_layout, settings, quiet=json == "-")
    _tell(rows, tables.BESIDE if against else tables.LAYOUT, json, report)


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
    report: _Report = "",
) -> None:
    """Time handoffs between two processes: from an offer that the target knows until it has seen the outcome.

    Handoffs at once stand next to one large handoff of the same blocks, in turn.
    """
    from kvlink.bench import tables
    from kvlink.bench.handoff import HandoffSetting, measure_handoffs
    from kvlink.bench.sizes import parse_numbers, parse_size

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
    _tell(_measure(measure_handoffs, settings, quiet=json == "-"), tables.HANDOFF, json, report)


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
    report: _Report = "",
) -> None:
    """Let many nodes read from one at once, next to one that reads as much."""
    from kvlink.bench import tables

    rows = _fan("fanout", peers, block_bytes, total_bytes, lane=lane, threads=threads, repeat=repeat, quiet=json == "-")
    _tell(rows, tables.FAN, json, report)


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
    report: _Report = "",
) -> None:
    """Let one node read from many at once, next to reading as much from one."""
    from kvlink.bench import tables

    rows = _fan("incast", peers, block_bytes, total_bytes, lane=lane, threads=threads, repeat=repeat, quiet=json == "-")
    _tell(rows, tables.FAN, json, report)


def _fan(
    shape: Shape,
    peers: str,
    block_bytes: str,
    total_bytes: str,
    *,
    lane: str,
    threads: int,
    repeat: int,
    quiet: bool,
) -> list[Any]:
    from kvlink.bench.fan import FanSetting, measure_fan
    from kvlink.bench.sizes import parse_numbers, parse_size

    settings = [
        FanSetting(
            shape=shape,
            peers=count,
            block_bytes=parse_size(block_bytes),
            total_bytes=parse_size(total_bytes),
            lane=lane,
            threads=threads,
            repeat=repeat,
        )
        for count in parse_numbers(peers)
    ]
    return _measure(measure_fan, settings, quiet=quiet)


@app.command()
def idle(
    *,
    peers: Annotated[int, typer.Option(min=1, max=4000, help="Nodes that one node is connected to.")] = 320,
    seconds: Annotated[float, typer.Option(min=0.1, max=600, help="How long nothing happens.")] = 10.0,
    lane: Annotated[str, typer.Option(help="auto, mapped, vectored, get or staged: how they read before that.")] = (
        "auto"
    ),
    json: _Json = "",
    report: _Report = "",
) -> None:
    """Measure what a connected peer costs a node that has nothing to do. The peers live in four processes."""
    from kvlink.bench import tables
    from kvlink.bench.idle import IdleSetting, measure_idle

    _tell(measure_idle(IdleSetting(peers=peers, seconds=seconds, lane=lane)), tables.IDLE, json, report)


@app.command()
def plan(
    *,
    size: Annotated[str, typer.Option(help="Blocks x regions, several by commas.")] = "4096x64,128x64",
    repeat: _Repeat = 51,
    json: _Json = "",
    report: _Report = "",
) -> None:
    """Plan requests of scattered blocks and hand every copy to a lane that only counts: no bytes move."""
    from kvlink.bench import tables
    from kvlink.bench.planning import PlanSetting, measure_plan
    from kvlink.bench.sizes import parse_counts

    settings = []
    for one_size in size.split(","):
        blocks, regions = parse_counts(one_size)
        settings.append(PlanSetting(blocks=blocks, regions=regions, repeat=repeat))
    _tell(_measure(measure_plan, settings, quiet=json == "-"), tables.PLAN, json, report)


def _serve(address: str, *, secret_file: str, advertise: str) -> None:
    from contextlib import closing, suppress

    from kvlink.bench.two_hosts import BenchServer, read_secret

    with closing(BenchServer(address, secret=read_secret(secret_file), advertise=advertise or None)) as server:
        typer.echo(f"kvlink bench: serving at {server.address} until interrupted", err=True)
        with suppress(KeyboardInterrupt):
            server.run()


def _systems(names: Sequence[str]) -> Callable[[Any], Any]:
    """Return how to measure those systems that can be had here, and say what is wrong with the others."""
    from kvlink.bench.choice import choose_systems
    from kvlink.bench.peers import checkout_place
    from kvlink.bench.transfer import measure_systems

    chosen, missing = choose_systems(names, checkout_place())
    for reason in missing:
        typer.echo(f"kvlink bench: {reason}", err=True)

    def say(name: str, error: Exception) -> None:
        typer.echo(f"kvlink bench: {name} is left out of a row: {type(error).__name__}: {error}", err=True)

    return lambda setting: measure_systems(setting, chosen, on_failure=say)


def _remote(address: str, names: Sequence[str], *, secret_file: str) -> Callable[[Any], Any]:
    from kvlink.bench.systems import MemcpySystem
    from kvlink.bench.transfer import measure_systems
    from kvlink.bench.two_hosts import connect_to, read_secret
    from kvlink.errors import InvalidArgument

    if not {"kvlink"} <= set(names) <= {"kvlink", "memcpy"}:
        raise InvalidArgument(f"--connect measures kvlink and memcpy only, not {', '.join(names)}")
    start = connect_to(address, secret=read_secret(secret_file))
    return lambda setting: measure_systems(setting, {"kvlink": start, "memcpy": MemcpySystem})


def _transfer_settings(block_bytes: str, lane: str, *, total_bytes: str, memory: str, **others: int) -> list[Setting]:
    from kvlink.bench.scattered import Geometry
    from kvlink.bench.sizes import parse_size
    from kvlink.bench.systems import Setting
    from kvlink.errors import InvalidArgument

    if memory not in ("kvlink", "foreign"):
        raise InvalidArgument(f"memory is {memory!r}, neither kvlink nor foreign")
    return [
        Setting(
            geometry=Geometry(block_bytes=parse_size(size), total_bytes=parse_size(total_bytes)),
            lane=one_lane.strip(),
            memory=memory,
            **others,
        )
        for one_lane in lane.split(",")
        for size in block_bytes.split(",")
    ]


def _measure(measure: Callable[[Any], Any], settings: Sequence[Any], *, quiet: bool) -> list[Any]:
    from rich.progress import track

    return [measure(setting) for setting in track(settings, "measuring", disable=quiet, transient=True)]


def _tell(rows: Sequence[Mapping[str, Any]], table: Table, json: str, report: str = "") -> None:
    """Write the rows where they were asked for, and print them unless that is standard output. Wrong bytes exit 1."""
    from kvlink.bench.page import write_page
    from kvlink.bench.tables import print_table
    from kvlink.report import write_report

    if json:
        write_report(json, rows)
    if report:
        write_page(report, table, rows)
    if not all(row.get("verified", True) for row in rows):
        typer.echo("kvlink bench: the target does not hold what the source offered", err=True)
        raise typer.Exit(1)
    if json != "-":
        print_table(table, rows)
