"""How rows of the benchmarks look on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvlink.bench.sizes import format_size

__all__ = ["COMPARED", "HANDOFF", "IDLE", "LAYOUT", "PLAN", "TRANSFER", "Table", "print_table"]

_Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Column:
    heading: str
    cell: Callable[[_Row], str]
    justify: Any = "right"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """What one benchmark prints: a title made from its first row, columns, and what to know of them."""

    title: Callable[[_Row], str]
    columns: tuple[_Column, ...]
    caption: str | None = None


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
)

COMPARED = Table(
    title=lambda row: "The same scattered blocks by several systems in turn",
    columns=(
        _name("system"),
        _name("lane"),
        _name("memory"),
        _size("block_bytes", "block"),
        *_SPEEDS,
        _number("cpu_s_per_gb_source", "CPU s/GB\nsource"),
        _number("cpu_s_per_gb_target", "CPU s/GB\ntarget"),
        _number("ratio_to_memcpy", "to\nmemcpy"),
        _Column("kvlink\nto it", lambda row: _inverse(row["ratios"].get("kvlink"))),
    ),
    caption="Medians; ratios are of pairs. Every byte was verified.",
)

LAYOUT = Table(
    title=lambda row: f"Handoffs between unlike layouts: copy threads a side {row['threads']}",
    columns=(_name("pair"), _name("lane"), _size("run_bytes", "run"), _count("runs"), *_SPEEDS, *_LIMIT),
    caption="Medians; the ratio is to one thread of memcpy over the same runs. Every element was verified.",
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
)

IDLE = Table(
    title=lambda row: f"A node with nothing to do for {row['seconds']:g} s",
    columns=(
        _name("role"),
        _count("peers"),
        _number("cpu_percent", "CPU\n% of a core"),
        _Column("RSS\na peer", lambda row: f"{row['rss_bytes_per_peer'] / 1024:.0f}KiB"),
        _number("descriptors_per_peer", "descriptors\na peer", 1),
        _count("threads"),
    ),
)
