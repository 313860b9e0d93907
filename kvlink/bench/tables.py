"""How rows of the benchmarks look on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvlink.bench.charts import Bars, Chart, Distribution, Lines
from kvlink.bench.sizes import format_size

__all__ = ["BESIDE", "COMPARED", "FAN", "HANDOFF", "IDLE", "LAYOUT", "PLAN", "TRANSFER", "Table", "print_table"]

_Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Column:
    heading: str
    cell: Callable[[_Row], str]
    justify: Any = "right"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """What one benchmark shows: a title made from its first row, columns, what to know of them, and what to draw."""

    title: Callable[[_Row], str]
    columns: tuple[_Column, ...]
    caption: str | None = None
    charts: tuple[Chart, ...] = ()


def print_table(table: Table, rows: Sequence[_Row]) -> None:
    """Print `rows` to standard output. There must be one."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable

    shown = RichTable(
        title=table.title(rows[0]), caption=table.caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False
    )
    for column in table.columns:
        shown.add_column(column.heading, justify=column.justify, no_wrap=True)
    for row in rows:
        shown.add_row(*(column.cell(row) for column in table.columns))
    Console().print(shown)


def _name(key: str) -> _Column:
    return _Column(key, lambda row: str(row[key]), "left")


def _count(key: str, heading: str | None = None) -> _Column:
    return _Column(heading or key, lambda row: f"{row[key]:,}")


def _number(key: str, heading: str, digits: int = 2) -> _Column:
    return _Column(heading, lambda row: "-" if row[key] is None else f"{row[key]:.{digits}f}")


def _size(key: str, heading: str) -> _Column:
    return _Column(heading, lambda row: format_size(row[key]))


def _inverse(ratio: float | None) -> str:
    return "" if ratio is None else f"{1 / ratio:.2f}"


_SPEEDS = (_number("gbps_median", "GB/s"), _number("gbps_min", "min"), _number("gbps_max", "max"))
_LIMIT = (_number("memcpy_gbps", "memcpy\nGB/s"), _number("ratio_to_memcpy", "ratio"))


def _kvlink_is(row: _Row) -> str:
    if row["system"] != "kvlink":
        return ""
    own = "its own memory" if row["memory"] == "kvlink" else "foreign memory"
    return f"; kvlink with {own}, copy threads a side {row['threads']}"


def _handoffs(row: _Row) -> str:
    return f"{row['blocks']:,} block{'s' if row['blocks'] > 1 else ''}, {row['concurrent']:,} at once"


def _speed_charts(label: Callable[[_Row], str]) -> tuple[Chart, ...]:
    return (
        Lines(
            title="Bandwidth over block size",
            unit="GB/s: median, and the band of all",
            label=label,
            value=lambda row: row["gbps_median"],
            low="gbps_min",
            high="gbps_max",
        ),
        Lines(
            title="Next to one thread of memcpy over the same blocks",
            unit="median of paired ratios",
            label=label,
            value=lambda row: row["ratio_to_memcpy"],
            one_is="memcpy",
        ),
        Lines(
            title="Processor time of both sides",
            unit="CPU seconds a GB",
            label=label,
            value=lambda row: row["cpu_s_per_gb_source"] + row["cpu_s_per_gb_target"],
        ),
    )


TRANSFER = Table(
    title=lambda row: f"Handoffs of scattered blocks: memory {row['memory']}, copy threads a side {row['threads']}",
    columns=(
        _name("lane"),
        _size("block_bytes", "block"),
        *_SPEEDS,
        _number("post_us_median", "post\nus", 0),
        _number("cpu_s_per_gb_source", "CPU s/GB\nsource"),
        _number("cpu_s_per_gb_target", "CPU s/GB\ntarget"),
        *_LIMIT,
    ),
    caption="Medians; the ratio is to one thread of memcpy over the same blocks. Every byte was verified.",
    charts=_speed_charts(lambda row: f"{row['system']} {row['lane']}"),
)

COMPARED = Table(
    title=lambda row: f"The same scattered blocks by systems in turn{_kvlink_is(row)}",
    columns=(
        _name("system"),
        _name("lane"),
        _size("block_bytes", "block"),
        *_SPEEDS,
        _Column("CPU\ns/GB", lambda row: f"{row['cpu_s_per_gb_source'] + row['cpu_s_per_gb_target']:.2f}"),
        _number("ratio_to_memcpy", "to\nmemcpy"),
        _Column("kvlink\nto it", lambda row: _inverse(row["ratios"].get("kvlink"))),
    ),
    caption="Medians; CPU of both sides; ratios are of pairs. Every byte was verified.",
    charts=_speed_charts(lambda row: row["system"]),
)

LAYOUT = Table(
    title=lambda row: f"Handoffs between unlike layouts: copy threads a side {row['threads']}",
    columns=(_name("pair"), _name("lane"), _size("run_bytes", "run"), _count("runs"), *_SPEEDS, *_LIMIT),
    caption="Medians; the ratio is to one thread of memcpy over the same runs. Every element was verified.",
    charts=(
        Bars(
            title="Next to one thread of memcpy over the same runs",
            unit="ratio: median, least and greatest; above 1 is faster than memcpy",
            label=lambda row: f"{row['pair']}, runs of {format_size(row['run_bytes'])}",
            parts={"ratio_to_memcpy": "kvlink"},
            low="ratio_min",
            high="ratio_max",
            one_is="memcpy",
        ),
    ),
)

BESIDE = replace(
    LAYOUT,
    title=lambda row: f"Handoffs between unlike layouts beside {row['against']}: copy threads a side {row['threads']}",
    columns=(
        _name("pair"),
        _name("lane"),
        _size("run_bytes", "run"),
        *_SPEEDS,
        *_LIMIT,
        _number("ratio_to_against", "to beside"),
    ),
)

PLAN = Table(
    title=lambda row: "From a request to its last post, with a lane that only counts",
    columns=(
        _count("blocks"),
        _count("regions"),
        _count("runs"),
        _number("request_to_last_post_us_median", "median\nus", 0),
        _number("request_to_last_post_us_min", "min", 0),
        _number("request_to_last_post_us_max", "max", 0),
        _number("check_us_median", "check", 0),
        _number("plan_us_median", "plan", 0),
        _number("post_us_median", "post", 0),
    ),
    charts=(
        Bars(
            title="From a request to its last post, by phase",
            unit="microseconds: medians of the phases",
            label=lambda row: f"{row['blocks']:,} x {row['regions']}",
            parts={"check_us_median": "check", "plan_us_median": "plan", "post_us_median": "post"},
        ),
    ),
)

HANDOFF = Table(
    title=lambda row: (
        f"Handoffs from a known offer to the outcome: copy threads a side {row['threads']}"
        f"{', with one core busy' if row['busy'] else ''}"
    ),
    columns=(
        _name("lane"),
        _count("blocks"),
        _size("block_bytes", "block"),
        _count("concurrent", "at once"),
        _count("handoffs"),
        _number("p50_us", "p50\nus", 0),
        _number("p99_us", "p99\nus", 0),
        _number("gbps", "GB/s"),
        _number("gbps_one_large", "one large\nGB/s"),
        _number("ratio_to_one_large", "ratio"),
    ),
    caption="The ratio is to one handoff of all blocks at once, in turn. Every byte was verified.",
    charts=(
        Distribution(
            title="Latency of a handoff",
            unit="microseconds from the call of pull until the outcome was seen",
            label=_handoffs,
            percentiles="percentiles_us",
        ),
        Bars(
            title="Bandwidth",
            unit="GB/s: median over rounds",
            label=_handoffs,
            parts={"gbps": "handoffs"},
        ),
    ),
)

FAN = Table(
    title=lambda row: (
        f"Handoffs at once, {'1 to many' if row['shape'] == 'fanout' else 'many to 1'}: "
        f"{format_size(row['total_bytes'])} in all, copy threads {row['threads']}"
    ),
    columns=(
        _name("lane"),
        _count("peers"),
        _size("block_bytes", "block"),
        _number("gbps", "GB/s\nof all"),
        _number("gbps_one_to_one", "one to one\nGB/s"),
        _number("ratio_to_one_to_one", "ratio"),
        _number("slowest_to_mean", "slowest\nto mean"),
    ),
    caption="Medians; the ratio is to one handoff of as many bytes, in turn. Every byte was verified.",
    charts=(
        Bars(
            title="All together",
            unit="bandwidth over that of one handoff of as many bytes",
            label=lambda row: f"{row['peers']} peers",
            parts={"ratio_to_one_to_one": "ratio"},
            one_is="one to one",
        ),
    ),
)

IDLE = Table(
    title=lambda row: f"A node with nothing to do for {row['seconds']:.3g} s",
    columns=(
        _name("role"),
        _count("peers"),
        _number("cpu_percent", "CPU\n% of a core"),
        _Column("RSS\na peer", lambda row: f"{row['rss_bytes_per_peer'] / 1024:.0f}KiB"),
        _number("descriptors_per_peer", "descriptors\na peer", 1),
        _count("threads"),
    ),
    charts=tuple(
        Bars(title=title, unit=unit, label=lambda row: f"{row['role']}, {row['peers']:,} peers", parts={key: title})
        for key, title, unit in (
            ("cpu_percent", "Processor time of the whole process", "% of a core"),
            ("rss_bytes_per_peer", "Memory of a peer", "bytes that a further peer takes"),
        )
    ),
)
