"""What plots have in common: axes, grid and ticks, a marker and a colour per series, the SVG document around them."""

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 960, 600
LEFT, TOP, BOTTOM = 84, 64, 64  # pixels around the axes
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc4c8f", "#b8860b", "#1ba3c6", "#6a3d9a", "#7f4f24", "#444444")
DASHES = ("none", "7 3", "2 3")
MARKERS = ("M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z", "M-4-4h8v8h-8z", "M0-5l5 9h-10z", "M0-5.5l5.5 5.5-5.5 5.5-5.5-5.5z")
LINE, LETTER = 15, 7.0  # pixels of a label: its height, and the width of a letter


class Axis(NamedTuple):
    """One axis.

    Attributes:
        label: What it shows, with its unit.
        log: Whether it is logarithmic; values that are not positive are then left out.
        ticks: Where its ticks are; () chooses them.
    """

    label: str
    log: bool = False
    ticks: tuple[float, ...] = ()

    def scaled(self, value: float) -> float:
        """A value, or its logarithm to base ten."""
        return math.log10(value) if self.log else value


class Frame:
    """The axes around some points: from values to pixels.

    Args:
        points: (x, y) of all that is drawn; those that cannot be shown do not count.
        x: The horizontal axis.
        y: The vertical one.
        right: Pixels to the right of the axes.
    """

    def __init__(self, points: Sequence[tuple[float, float]], x: Axis, y: Axis, right: float) -> None:
        self.axes = (x, y)
        self.edge = WIDTH - right
        shown = [point for point in points if self.shows(*point)]
        self.ranges = [_range([axis.scaled(point[k]) for point in shown], axis) for k, axis in enumerate(self.axes)]

    def shows(self, *point: float) -> bool:
        """Whether a point can be drawn."""
        pairs = zip(point, self.axes, strict=True)
        return all(math.isfinite(value) and (value > 0 or not axis.log) for value, axis in pairs)

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Pixels of a point."""
        return self._across(self.axes[0].scaled(x)), self._up(self.axes[1].scaled(y))

    def _across(self, scaled: float) -> float:
        low, high = self.ranges[0]
        return LEFT + (scaled - low) / (high - low) * (self.edge - LEFT)

    def _up(self, scaled: float) -> float:
        low, high = self.ranges[1]
        return HEIGHT - BOTTOM - (scaled - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def drawn(self) -> Iterator[str]:
        """Grid, ticks and labels of the axes."""
        bottom, edge = HEIGHT - BOTTOM, self.edge
        for tick in self._ticks(0):
            a = self._across(self.axes[0].scaled(tick))
            yield f'<path d="M{a:.1f} {TOP}V{bottom}" stroke="#e2e2e2"/>'
            yield f'<text x="{a:.1f}" y="{bottom + 18}" text-anchor="middle" fill="#444">{tick:,.10g}</text>'
        for tick in self._ticks(1):
            b = self._up(self.axes[1].scaled(tick))
            yield f'<path d="M{LEFT} {b:.1f}H{edge:.1f}" stroke="#e2e2e2"/>'
            yield f'<text x="{LEFT - 8}" y="{b + 4:.1f}" text-anchor="end" fill="#444">{tick:,.10g}</text>'
        yield f'<path d="M{LEFT} {TOP}V{bottom}H{edge:.1f}" fill="none" stroke="#444"/>'
        middle = 'text-anchor="middle" fill="#222" font-size="14"'
        x, y = (escape(axis.label) + (" (log scale)" if axis.log else "") for axis in self.axes)
        yield f'<text x="{(LEFT + edge) / 2:.1f}" y="{HEIGHT - 18}" {middle}>{x}</text>'
        yield f'<text transform="translate(22 {(TOP + bottom) / 2}) rotate(-90)" {middle}>{y}</text>'

    def _ticks(self, k: int) -> list[float]:
        axis, (low, high) = self.axes[k], self.ranges[k]
        ticks = axis.ticks or _round_numbers(low, high, axis.log)
        return [tick for tick in ticks if low - 1e-9 <= axis.scaled(tick) <= high + 1e-9]


def document(title: str, note: str, parts: Sequence[str]) -> str:
    """An SVG file of some parts."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="12" role="img">'
        f'<title>{escape(title)}</title><rect width="100%" height="100%" fill="#fff"/>'
        f'<text x="{LEFT}" y="26" font-size="17" font-weight="bold" fill="#111">{escape(title)}</text>'
        f'<text x="{LEFT}" y="46" fill="#555">{escape(note)}</text>'
    )
    return "\n".join([head, *parts, "</svg>\n"])


def marker(i: int, a: float, b: float) -> str:
    """The marker of the i-th series."""
    fill = COLOURS[i % len(COLOURS)] if i < len(COLOURS) else "#fff"
    shape = MARKERS[i % len(MARKERS)]
    return f'<path d="{shape}" transform="translate({a:.1f} {b:.1f})" fill="{fill}" stroke-width="1.5"/>'


def _range(scaled: Sequence[float], axis: Axis) -> tuple[float, float]:
    """Ends of an axis, scaled, with some room around the values."""
    low, high = min(scaled, default=0.0), max(scaled, default=0.0)
    room = 0.05 * (high - low) or (0.3 if axis.log else abs(high) * 0.1 or 1.0)
    return low - room, high + room


def _round_numbers(low: float, high: float, log: bool) -> list[float]:
    """1, 2 or 5 times a power of ten, between the ends of an axis."""
    if log:
        steps = (1,) if high - low > 2.5 else (1, 2, 5)
        return [step * 10.0**e for e in range(math.floor(low), math.ceil(high) + 1) for step in steps]
    power = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = next(step * power for step in (1, 2, 5, 10) if (high - low) / (step * power) <= 8)
    return [k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)]
