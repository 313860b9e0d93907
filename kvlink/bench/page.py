"""One self-contained HTML page of a benchmark: plots, the table, the machine, and the rows as JSON."""

from __future__ import annotations

import html
import importlib.util
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kvlink
from kvlink.bench.charts import Chart
from kvlink.bench.sizes import format_size
from kvlink.bench.tables import Table
from kvlink.errors import ConfigError
from kvlink.report import command_line, machine_facts

__all__ = ["check_page", "write_page"]

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #161616; background: #fff; margin: 2rem auto; max-width: 62rem;
  padding: 0 1rem; }}
h1 {{ font-size: 1.45rem; line-height: 1.25; margin: 0 0 .75rem; }}
h2 {{ font-size: 1.05rem; margin: 2rem 0 .5rem; }}
code {{ background: #f4f4f4; padding: .1rem .35rem; border-radius: 3px; overflow-wrap: anywhere; }}
svg {{ max-width: 100%; height: auto; display: block; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: 0; }}
dt {{ color: #6f6f6f; }}
dd {{ margin: 0; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .3rem .7rem; text-align: right; border-bottom: 1px solid #e0e0e0; white-space: nowrap; }}
th {{ vertical-align: bottom; color: #525252; font-weight: 600; white-space: pre-line; }}
th.left, td.left {{ text-align: left; }}
.note {{ color: #525252; }}
.wrong {{ color: #da1e28; font-weight: 600; }}
</style>
</head>
<body>
<h1>{title}</h1>
<dl>{facts}</dl>
{wrong}
{charts}
<h2>Rows</h2>
<div class="wide">{table}</div>
<p class="note">{caption}</p>
<script type="application/json" id="rows">{rows}</script>
</body>
</html>
"""


def check_page(path: str) -> str:
    """Return `path` if `write_page` can draw and write there: asked before what it shows is measured.

    Raises
    ------
    ConfigError
        If matplotlib is not installed, or the file cannot be written.
    """
    if path:
        if importlib.util.find_spec("matplotlib") is None:
            raise ConfigError("--report draws with matplotlib, which is not installed: pip install 'kvlink[bench]'")
        try:
            with Path(path).open("a", encoding="utf-8"):
                pass
        except OSError as error:
            raise ConfigError(f"--report: {path} cannot be written: {error.strerror}") from None
    return path


def write_page(path: str, table: Table, rows: Sequence[Any]) -> None:
    """Write the page of `rows` to `path`. There must be one row. Nothing of it is loaded from elsewhere."""
    title = table.title(rows[0])
    wrong = not all(row.get("verified", True) for row in rows)
    text = _PAGE.format(
        title=html.escape(title),
        facts="".join(f"<dt>{html.escape(name)}</dt><dd>{value}</dd>" for name, value in _facts()),
        wrong='<p class="wrong">Some bytes were wrong.</p>' if wrong else "",
        charts="\n".join(f"<h2>{html.escape(chart.title)}</h2>\n{_svg(chart, rows)}" for chart in table.charts),
        table=_table(table, rows),
        caption=html.escape(table.caption or ""),
        rows=json.dumps(list(rows)).replace("<", "\\u003c"),
    )
    Path(path).write_text(text, encoding="utf-8")


def _facts() -> list[tuple[str, str]]:
    machine = machine_facts()
    return [
        ("command", f"<code>{html.escape(' '.join(command_line()))}</code>"),
        ("kvlink", html.escape(kvlink.__version__)),
        ("machine", html.escape(f"{machine['cores']} cores of {machine['cpu']}, {_memory(machine['memory_bytes'])}")),
        ("system", html.escape(f"Linux {machine['kernel']}, Python {machine['python']}")),
    ]


def _memory(size_bytes: int) -> str:
    return format_size(round(size_bytes / (1 << 30)) << 30) if size_bytes >= 1 << 30 else format_size(size_bytes)


def _svg(chart: Chart, rows: Sequence[Any]) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    settings: dict[str, Any] = {
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
    }
    settings |= {"grid.color": "#e0e0e0", "axes.axisbelow": True, "svg.hashsalt": chart.title}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(9.6, chart.height(rows)), layout="constrained")
        chart.draw(figure.subplots(), rows)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    svg = drawn.getvalue()
    # Several pictures share the page, so ids of glyphs and clips must not meet.
    own = re.sub(r"\W+", "-", chart.title)
    svg = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{own}-", svg[svg.index("<svg") :])
    return svg.replace("<svg ", f'<svg role="img" aria-label="{html.escape(chart.title)}" ', 1)


def _table(table: Table, rows: Sequence[Any]) -> str:
    def line(tag: str, cells: list[str]) -> str:
        styled = zip(cells, table.columns, strict=True)
        return "".join(f'<{tag} class="{column.justify}">{html.escape(cell)}</{tag}>' for cell, column in styled)

    head = line("th", [column.heading for column in table.columns])
    body = "".join(f"<tr>{line('td', [column.cell(row) for column in table.columns])}</tr>\n" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>"
