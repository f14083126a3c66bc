"""Plots as SVG text, light or dark as the reader has chosen: curves, and points with the front of the best ones."""

import io
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogFormatter, NullLocator

from linvit.io.plain_text import printable

Point = tuple[float, float]
COLOURS = ("#0a7cc0", "#d55e00", "#009e73", "#cc4c8f", "#b8860b", "#1ba3c6", "#8e63c4", "#a0703c", "#7d7d7d")
MARKERS = "os^Dv<>P*X"
LINES = ("-", "--", ":")
STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "font.size": 11,
    "grid.color": "#e2e2e2",
    "svg.fonttype": "none",  # text stays text, which can be searched and copied
    "svg.hashsalt": "linvit",  # the same plot is the same text
    "text.parse_math": False,  # a name may have a $
}

DARK = """
@media (prefers-color-scheme: dark) {
  text { fill: #e4e7ea } [style*="fill: #555555"] { fill: #9da7b0 !important }
  [style*="fill: #ffffff"] { fill: #161b20 !important } [style*="stroke: #000000"] { stroke: #9da7b0 !important }
  [style*="stroke: #e2e2e2"] { stroke: #3a424a !important } [style*="stroke: #cccccc"] { stroke: #5d666f !important }
}
"""  # for elements in the colours of paper, ink and grid; COLOURS are visible on both


class Axis(NamedTuple):
    """One axis."""

    label: str  # with its unit
    log: bool = False  # values that are not positive are then left out
    ticks: tuple[float, ...] = ()  # () chooses them


class Series(NamedTuple):
    """One curve, or some points; values that are not finite are left out."""

    name: str
    points: tuple[Point, ...]
    spread: tuple[float, ...] = ()  # of each y, up and down, drawn as a bar; NaN none
    labels: tuple[str, ...] = ()  # of the points


PANEL = 4  # curves of a panel of small multiples
LEGEND_ROWS = 18  # that fit beside a plot; more entries stand in further columns


def line_plot(
    title: str, series: Sequence[Series], x: Axis, y: Axis, note: str = "", *, front: bool | Literal["low"] = False
) -> str:
    """Draws a curve per series as the text of an SVG file; the legend has them in the order of their right ends.

    With `front` points stand alone, and a grey line joins those of the `pareto` front; "low" prefers a small y.
    """
    with mpl.rc_context(STYLE):
        figure, axes = _axes(title, x, y, note)
        solid: list[Point] = []
        entries = []
        for i, one in enumerate(series):
            line = "none" if front else LINES[i // len(COLOURS) % len(LINES)]
            points, drawn = _draw(axes, one, x, y, **look(i), linestyle=line)
            solid += points
            entries += [(point, one.name, drawn) for point in points[-1:]]
            for point, label in zip(one.points, one.labels, strict=False):
                axes.annotate(label, point, (6, 3), textcoords="offset points", color=COLOURS[i % len(COLOURS)])
        if front:
            sign = -1 if front == "low" else 1
            best = pareto([(x, sign * y) for x, y in solid])
            axes.plot([x for x, _ in best], [sign * y for _, y in best], color="#cccccc", linewidth=5, zorder=0)
        else:
            entries.sort(key=lambda entry: entry[0], reverse=True)
        columns = -(-len(entries) // LEGEND_ROWS)
        width, height = figure.get_size_inches()
        figure.set_size_inches(width + 2.2 * (columns - 1), height)
        handles, names = [drawn for *_, drawn in entries], [name for _, name, _ in entries]
        axes.legend(handles, names, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, ncols=columns)
        return svg(figure)


def pareto(points: Sequence[Point]) -> list[Point]:
    """Returns the points that no other one beats, from left to right: the smaller x and the larger y, the better."""
    return [
        point for point in sorted(points) if not any(x <= point[0] and y >= point[1] for x, y in {*points} - {point})
    ]


def small_multiples(
    title: str, series: Sequence[Series], x: Axis, y: Axis, note: str = "", levels: Sequence[Series] = ()
) -> str:
    """Draws curves, `PANEL` of them in each of several panels with the same axes; levels are grey lines in all."""
    parts = [series[start : start + PANEL] for start in range(0, len(series), PANEL)]
    columns = min(len(parts), 3)
    rows = -(-len(parts) // columns)
    with mpl.rc_context(STYLE):
        figure = Figure((max(4 * columns, 6) + 0.5, 3.2 * rows + 1))
        panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flatten()
        figure.suptitle(f"{title}\n{note}", fontsize=10)
        for axes, own in zip(panels, parts, strict=False):
            _scale(axes, x, y)
            for level in levels:
                axes.plot(*zip(*level.points, strict=True), color="#cccccc", zorder=0)
                axes.annotate(level.name, level.points[0], (0, 3), textcoords="offset points", fontsize=8)
            for i, one in enumerate(own):
                _draw(axes, one, x, y, **look(i), label=one.name)
            if axes.get_legend_handles_labels()[1]:
                axes.legend(fontsize=8, frameon=False)
        for axes in panels[len(parts) :]:
            axes.set_visible(False)
        return svg(figure)


def bar_plot(title: str, bars: Sequence[tuple[str, float, float]], label: str, note: str = "") -> Figure:
    """Draws a horizontal bar per name, value and spread, the largest above; small, as for TensorBoard's cards."""
    bars = sorted((bar for bar in bars if math.isfinite(bar[1])), key=lambda bar: bar[1])
    with mpl.rc_context({**STYLE, "font.size": 9}):
        figure, axes = _axes(title, Axis(label), Axis(""), "")
        figure.set_size_inches(4.2, 1.6 + 0.22 * len(bars))
        figure.supxlabel(note, fontsize=6, color="#555555")
        names, values, spreads = zip(*bars, strict=True) if bars else ((), (), ())
        drawn = axes.barh(range(len(bars)), values, xerr=spreads, color=COLOURS[0], ecolor="#888888")
        axes.bar_label(drawn, [f" {value:.4g}" for value in values])
        axes.set_yticks(range(len(bars)), [name[:40] for name in names])
        low, high = min(values, default=0), max(values, default=0)
        if low < high < 1.5 * low:  # bars from 0 on would all look alike
            axes.set_xlim(left=low - (high - low))
        axes.margins(x=0.15)
    return figure


def heat_map(title: str, values: np.ndarray, rows: Sequence[str], columns: Sequence[str], note: str = "") -> Figure:
    """Draws a table (rows, columns) of numbers with their colours, from 0 to the largest; NaN is an empty cell."""
    wide = max([4, *(len(line) for name in columns for line in name.split("\n"))])
    with mpl.rc_context({**STYLE, "axes.grid": False, "font.size": 10}):
        figure = Figure((2.5 + (0.1 + 0.085 * wide) * len(columns), 1.2 + 0.3 * len(rows)))
        axes = figure.subplots()
        figure.suptitle(title)
        figure.supxlabel(note, fontsize=9, color="#555555")
        axes.imshow(np.ma.masked_invalid(values), aspect="auto", vmin=0)
        axes.set_xticks(range(len(columns)), columns)
        axes.set_yticks(range(len(rows)), rows)
        light = 0.6 * np.nanmax(values, initial=0)
        for (row, column), value in np.ndenumerate(values):
            if np.isfinite(value):
                ink = "#010101" if value > light else "#fefefe"  # also in dark mode
                axes.text(column, row, f"{value:.4g}", ha="center", va="center", color=ink)
    return figure


def _axes(title: str, x: Axis, y: Axis, note: str) -> tuple[Figure, Axes]:
    figure = Figure((10, 6.25))
    axes = figure.subplots()
    figure.suptitle(title)
    axes.set_title(note, fontsize=9, color="#555555")
    _scale(axes, x, y)
    return figure, axes


def _scale(axes: Axes, x: Axis, y: Axis) -> None:
    for axis, drawn, scale in ((x, axes.xaxis, axes.set_xscale), (y, axes.yaxis, axes.set_yscale)):
        drawn.set_label_text(axis.label + " (log scale)" * axis.log)
        scale("log" if axis.log else "linear")
        drawn.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        if axis.log:  # the default writes formulas, which are not parsed
            drawn.set_minor_formatter(LogFormatter(labelOnlyBase=False))
        if axis.ticks:
            drawn.set_major_locator(FixedLocator(axis.ticks))
            drawn.set_minor_locator(NullLocator())


def look(i: int) -> dict[str, Any]:
    """Returns the style of the i-th series; the first 90 styles are distinct."""
    return {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)], "markersize": 5, "capsize": 2}


def _draw(axes: Axes, series: Series, x: Axis, y: Axis, **style: Any) -> tuple[list[Point], Any]:
    """Draws the drawable points with their bars; returns them, and the handle for the legend."""
    spreads = np.nan_to_num(series.spread or np.zeros(len(series.points)))
    bars = [(*point, spread) for point, spread in zip(series.points, spreads, strict=True)]
    bars = [(a, b, e) for a, b, e in bars if math.isfinite(a + b) and (a > 0 or not x.log) and (b > e or not y.log)]
    if not bars:
        return [], None
    left, up, ends = zip(*bars, strict=True)
    return [*zip(left, up, strict=True)], axes.errorbar(left, up, ends, **style)


def svg(figure: Figure) -> str:
    """Returns a figure as the text of an SVG file."""
    file = io.StringIO()
    with mpl.rc_context(STYLE):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return printable(file.getvalue()).replace("</style>", f"{DARK}</style>", 1)
