"""What the page of a benchmark draws. A chart knows which keys of a row it shows; matplotlib comes from outside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvlink.bench.sizes import format_size

__all__ = ["Bars", "Chart", "Distribution", "Lines"]

_Row = Mapping[str, Any]
_Rows = Sequence[_Row]
_Label = Callable[[_Row], str]

#: One colour a system whatever else is in the picture, readable beside each other for most colour-blind people.
_SYSTEM_COLOURS = {
    "kvlink": "#0f62fe",
    "memcpy": "#6f6f6f",
    "socket": "#009d9a",
    "ucx": "#b28600",
    "ucxx": "#8a3ffc",
    "nixl": "#da1e28",
    "nixl-default": "#ff832b",
    "mooncake": "#a2191f",
}
_OTHER_COLOURS = ("#0f62fe", "#da1e28", "#009d9a", "#8a3ffc", "#b28600", "#ff832b", "#6f6f6f", "#a2191f")
_DASHED = ("memcpy",)


class Chart(Protocol):
    """Draws rows into the axes of matplotlib that it is given."""

    @property
    def title(self) -> str:
        """What is shown. No two charts of a page have the same."""
        ...

    def height(self, rows: _Rows) -> float:
        """Return how many inches high the picture should be."""
        ...

    def draw(self, axes: Any, rows: _Rows) -> None:
        """Draw all of `rows`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """A value over the block size, one line for each `label`, with a band from `low` to `high` where they are given."""

    title: str
    unit: str
    label: _Label
    value: Callable[[_Row], float]
    low: str | None = None
    high: str | None = None
    one_is: str | None = None

    def height(self, rows: _Rows) -> float:
        """Return the same for any rows."""
        return 4.2

    def draw(self, axes: Any, rows: _Rows) -> None:
        """Draw a line for each label, in the order in which they come."""
        sizes = sorted({row["block_bytes"] for row in rows})
        for number, label in enumerate(dict.fromkeys(self.label(row) for row in rows)):
            own = sorted((row for row in rows if self.label(row) == label), key=lambda row: row["block_bytes"])
            places = [sizes.index(row["block_bytes"]) for row in own]
            colour = _colour(own[0], number, label)
            style = "--" if own[0]["system"] in _DASHED else "-"
            width = 2.4 if own[0]["system"] == "kvlink" else 1.5
            axes.plot(
                places, [self.value(row) for row in own], style, marker="o", ms=4, lw=width, color=colour, label=label
            )
            if self.low and self.high:
                low, high = ([row[key] for row in own] for key in (self.low, self.high))
                axes.fill_between(places, low, high, color=colour, alpha=0.12, linewidth=0)
        axes.set_xticks(range(len(sizes)), [format_size(size) for size in sizes])
        axes.set_xlabel("contiguous bytes a block")
        axes.set_ylabel(self.unit)
        axes.set_ylim(bottom=0)
        if self.one_is and self.one_is not in (row["system"] for row in rows):
            axes.axhline(1, color="#393939", lw=1, ls=":", label=f"1 = {self.one_is}")
        _legend(axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """One bar a row; several `parts` lie on top of each other."""

    title: str
    unit: str
    label: _Label
    parts: Mapping[str, str]
    low: str | None = None
    high: str | None = None
    one_is: str | None = None

    def height(self, rows: _Rows) -> float:
        """Return enough for each bar and its name."""
        return 1.2 + 0.42 * len(rows)

    def draw(self, axes: Any, rows: _Rows) -> None:
        """Draw a bar a row, the first row at the top."""
        places = range(len(rows))
        left = [0.0] * len(rows)
        for (key, part), colour in zip(self.parts.items(), _OTHER_COLOURS, strict=False):
            values = [row[key] for row in rows]
            axes.barh(places, values, left=left, height=0.6, color=colour, label=part)
            left = [total + value for total, value in zip(left, values, strict=True)]
        spread = [0.0] * len(rows)
        if self.low and self.high:
            ends = [(row[self.low], row[self.high]) for row in rows]
            spread = [end[1] - total for end, total in zip(ends, left, strict=True)]
            under = [total - end[0] for end, total in zip(ends, left, strict=True)]
            axes.errorbar(left, places, xerr=[under, spread], fmt="none", ecolor="#393939", capsize=3, lw=1)
        widest = max(total + over for total, over in zip(left, spread, strict=True)) or 1.0
        for place, total, over in zip(places, left, spread, strict=True):
            text = f"{total:,.0f}" if total >= 1000 else f"{total:.3g}"
            axes.text(total + over + 0.015 * widest, place, text, va="center", fontsize=8.5)
        axes.set_xlim(0, widest * 1.12)
        axes.set_yticks(places, [self.label(row) for row in rows])
        axes.invert_yaxis()
        axes.set_xlabel(self.unit)
        axes.grid(axis="y", visible=False)
        if self.one_is:
            axes.axvline(1, color="#393939", lw=1, ls=":")
        if len(self.parts) > 1:
            _legend(axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """How much of everything was over by when: the percentiles of each row, on a logarithmic axis of time."""

    title: str
    unit: str
    label: _Label
    percentiles: str

    def height(self, rows: _Rows) -> float:
        """Return the same for any rows."""
        return 4.2

    def draw(self, axes: Any, rows: _Rows) -> None:
        """Draw a line a row, with marks at half and at 99 %."""
        from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

        for number, row in enumerate(rows):
            values = row[self.percentiles]
            shares = [100 * index / (len(values) - 1) for index in range(len(values))]
            colour = _OTHER_COLOURS[number % len(_OTHER_COLOURS)]
            axes.plot(values, shares, lw=1.8, color=colour, label=self.label(row))
            axes.plot([row["p50_us"], row["p99_us"]], [50, 99], "o", ms=4, color=colour)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(self.unit)
        axes.set_ylabel("% that took no longer")
        axes.set_ylim(0, 101)
        axes.grid(axis="x", which="minor", alpha=0.25)
        _legend(axes)


def _colour(row: _Row, number: int, label: str) -> str:
    other = _OTHER_COLOURS[number % len(_OTHER_COLOURS)]
    return _SYSTEM_COLOURS.get(row["system"], other) if label == row["system"] else other


def _legend(axes: Any) -> None:
    """Beside the axes, where it hides no line."""
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0, frameon=False)
