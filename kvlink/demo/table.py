"""The demo's table: what each handoff moved, how fast, and what it cost the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich import box
from rich.table import Table

from kvlink.demo.rows import CompareRow, PushRow, Row

__all__ = ["make_comparison", "make_pushes", "make_table"]

# More handoffs than this get one line each, and fewer numbers; up to this, one column each.
_MOST_COLUMNS = 4
_TITLE = "KV handed from prefill to decode"

_METRICS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("lane", lambda row: row["lane"]),
    ("prompt tokens", lambda row: f"{row['prompt_tokens']:,}"),
    ("new tokens", lambda row: f"{row['new_tokens']:,}"),
    ("KV bytes", lambda row: f"{row['kv_bytes']:,}"),
    ("transfer time", lambda row: _milliseconds(row["transfer_s"])),
    ("transfer rate", lambda row: f"{row['transfer_gbps']:.2f} GB/s"),
    ("time to first token", lambda row: _milliseconds(row["ttft_s"])),
    ("  of it prefill", lambda row: _milliseconds(row["prefill_s"])),
    ("  of it handoff", lambda row: _milliseconds(row["handoff_s"])),
    ("  of it first decode step", lambda row: _milliseconds(row["first_step_s"])),
    ("prefill tokens/s", lambda row: f"{row['prefill_tokens_per_s']:,.0f}"),
    ("decode tokens/s", lambda row: f"{row['decode_tokens_per_s']:,.1f}"),
    ("same tokens as the reference", lambda row: _yes_or_no(row)),
)

_LINE: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("#", lambda row: str(row["request"])),
    ("lane", lambda row: row["lane"]),
    ("prompt", lambda row: str(row["prompt_tokens"])),
    ("KV MB", lambda row: f"{row['kv_bytes'] / 1e6:.1f}"),
    ("move ms", lambda row: f"{row['transfer_s'] * 1e3:.1f}"),
    ("GB/s", lambda row: f"{row['transfer_gbps']:.1f}"),
    ("TTFT ms: prefill + handoff + step", lambda row: _sum_of_parts(row)),
    ("prefill/s", lambda row: f"{row['prefill_tokens_per_s']:.0f}"),
    ("decode/s", lambda row: f"{row['decode_tokens_per_s']:.1f}"),
    ("same", lambda row: _yes_or_no(row)),
)


def make_table(rows: Sequence[Row]) -> Table:
    """Return a table with a column for each handoff, or with a line for each if there are many."""
    return _by_column(rows) if len(rows) <= _MOST_COLUMNS else _by_line(rows)


def make_comparison(rows: Sequence[CompareRow]) -> Table:
    """Return a table with a line for each way of serving the same requests."""
    first = rows[0]
    table = Table(
        title=f"Longest wait of {first['others']} others for a token, when {first['document_tokens']:,} tokens arrive",
        caption=f"Medians of {first['repeat']}. Same: the tokens of all requests are those of the first line.",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    columns = ("", "threads", "longest\nwait ms", "usual\nwait ms", "ratio", "document's\ntoken ms", "same")
    for name in columns:
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for row in rows:
        table.add_row(
            row["way"] if row["chunk_tokens"] is None else f"{row['way']} by {row['chunk_tokens']}",
            "+".join(map(str, row["threads"])),
            f"{row['stall_ms_median']:,.0f}",
            f"{row['usual_ms_median']:,.0f}",
            f"{row['ratio_to_shared']:.2f}",
            f"{row['document_ttft_ms_median']:,.0f}",
            "yes" if row["same_tokens"] else "no",
        )
    return table


def make_pushes(rows: Sequence[PushRow]) -> Table:
    """Return a table with a line for each way of pushing each prompt."""
    table = Table(
        title="KV pushed while prefill computes, and at once",
        caption=f"Medians of {rows[0]['repeat']}. Exposed: from the end of the prefill until all is there.",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name in ("", "lane", "tokens", "KV MB", "prefill\nms", "exposed\nms", "ratio", "ratio\nof all", "same"):
        table.add_column(name, justify="left" if name in ("", "lane") else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["way"],
            row["lane"],
            f"{row['prompt_tokens']:,}",
            f"{row['kv_bytes'] / 1e6:.1f}",
            f"{row['prefill_ms_median']:,.0f}",
            f"{row['exposed_ms_median']:.1f}",
            f"{row['exposed_ratio_to_at_once']:.2f}",
            f"{row['total_ratio_to_at_once']:.2f}",
            "yes" if row["same_tokens"] else "NO",
        )
    return table


def _by_column(rows: Sequence[Row]) -> Table:
    table = Table("", title=_TITLE)
    for number, row in enumerate(rows, start=1):
        table.add_column(f"{number}: {row['lane_requested']}", justify="right")
    for name, text_of in _METRICS:
        table.add_row(name, *map(text_of, rows))
    return table


def _by_line(rows: Sequence[Row]) -> Table:
    table = Table(title=_TITLE, caption="prefill/s and decode/s are tokens a second", padding=(0, 0))
    for name, _ in _LINE:
        table.add_column(name, justify="left" if name == "lane" else "right")
    for row in rows:
        table.add_row(*(text_of(row) for _, text_of in _LINE))
    return table


def _sum_of_parts(row: Row) -> str:
    parts = (row["ttft_s"], row["prefill_s"], row["handoff_s"], row["first_step_s"])
    total, prefill, handoff, step = (f"{seconds * 1e3:.0f}" for seconds in parts)
    return f"{total}: {prefill}+{handoff}+{step}"


def _yes_or_no(row: Row) -> str:
    return "yes" if row["same_tokens"] else "NO"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds < 0.1 else f"{seconds * 1e3:,.0f} ms"
