"""Plots as SVG text, on a light background: curves over a quantity, and points with the front of the best ones."""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from linvit.experiments.plot_frame import (
    BOTTOM,
    COLOURS,
    DASHES,
    HEIGHT,
    LETTER,
    LINE,
    TOP,
    Axis,
    Frame,
    document,
    marker,
)

Point = tuple[float, float]


class Series(NamedTuple):
    """One curve, or some points.

    Attributes:
        name: Its label.
        points: (x, y); values that are not finite are left out.
        spread: Lower and upper bound of each y, drawn as bars; () draws none.
        labels: Of the points of a scatter plot; () takes the name.
    """

    name: str
    points: tuple[Point, ...]
    spread: tuple[Point, ...] = ()
    labels: tuple[str, ...] = ()


def line_plot(title: str, series: Sequence[Series], x: Axis, y: Axis, note: str = "") -> str:
    """Draws a curve per series, with its name at its right end in its colour.

    Args:
        title: Written above.
        series: Those at the same place of the list have the same colour in every plot; from the 28th on, they repeat.
        x: The horizontal axis.
        y: The vertical one.
        note: What the reader must know, such as the machine; written below the title.

    Returns:
        The text of an SVG file.
    """
    right = 30 + LETTER * max((len(one.name) for one in series), default=0)
    frame = Frame([point for one in series for point in one.points], x, y, right)
    parts, ends = [], []
    for i, one in enumerate(series):
        places = _places(frame, one)
        if not places:
            continue
        colour = COLOURS[i % len(COLOURS)]
        dash = DASHES[i // len(COLOURS) % len(DASHES)]
        parts += [
            f'<g stroke="{colour}" fill="none" stroke-width="1.8"><title>{escape(one.name)}</title>',
            f'<path d="{_path(places)}" stroke-dasharray="{dash}"/>',
            f'<path d="{_bars(frame, one)}" stroke-width="1"/>',
            *(marker(i, *place) for place in places),
            "</g>",
        ]
        ends.append((places[-1][1], places[-1][0], one.name, colour))
    ends.sort()
    for at, (b, a, name, colour) in zip(_apart([end[0] for end in ends]), ends, strict=True):
        parts += [
            f'<path d="M{a + 6:.1f} {b:.1f}L{frame.edge + 14:.1f} {at:.1f}" stroke="{colour}" stroke-width=".6"/>',
            f'<text x="{frame.edge + 18:.1f}" y="{at + 4:.1f}" fill="{colour}">{escape(name)}</text>',
        ]
    return document(title, note, [*frame.drawn(), *parts])


def scatter_plot(
    title: str, series: Sequence[Series], x: Axis, y: Axis, note: str = "", *, front: bool = False, lines: bool = False
) -> str:
    """Draws points with their labels beside them.

    Args:
        title: Written above.
        series: Points of one colour each.
        x: The horizontal axis; the smaller the better, for the front.
        y: The vertical one; the larger the better.
        note: Written below the title.
        front: Join the points that no other one beats in both (the Pareto front) by a grey line.
        lines: Join the points of each series.

    Returns:
        The text of an SVG file.
    """
    frame = Frame([point for one in series for point in one.points], x, y, right=110)
    parts, points = [], []
    for i, one in enumerate(series):
        colour, places = COLOURS[i % len(COLOURS)], _places(frame, one)
        path = _path(places) if lines and places else ""
        parts.append(f'<path d="{path}{_bars(frame, one)}" fill="none" stroke="{colour}" stroke-width="1.2"/>')
        parts += [f'<g stroke="{colour}">{marker(i, *place)}</g>' for place in places]
        for point, label in zip(one.points, one.labels or [one.name] * len(one.points), strict=True):
            if frame.shows(*point):
                points.append((point, label, colour))
    best: list[Point] = []
    for point in sorted((point for point, _, _ in points), key=lambda point: (point[0], -point[1])):
        if front and (not best or point[1] > best[-1][1]):
            best.append(point)
    if best:
        path = _path([frame.place(*point) for point in best])
        parts.insert(0, f'<path d="{path}" fill="none" stroke="#ccc" stroke-width="5" stroke-linejoin="round"/>')
    taken = [_Box.around(*frame.place(*point), 10) for point, _, _ in points]
    for point, label, colour in points:
        place = _beside(*frame.place(*point), LETTER * len(label), taken)
        where = f'x="{place[0]:.1f}" y="{place[1] + 4:.1f}" text-anchor="middle"'
        parts.append(f'<text {where} fill="{colour}">{escape(label)}</text>')
    return document(title, note, [*frame.drawn(), *parts])


def _places(frame: Frame, series: Series) -> list[Point]:
    return [frame.place(*point) for point in series.points if frame.shows(*point)]


def _path(places: Sequence[Point]) -> str:
    return "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in places)


def _bars(frame: Frame, series: Series) -> str:
    """The spread of each point as a vertical line."""
    bars = []
    for (x, y), (low, high) in zip(series.points, series.spread, strict=False):
        if frame.shows(x, y) and frame.shows(x, low):
            (a, bottom), (_, top) = frame.place(x, low), frame.place(x, high)
            bars.append(f"M{a:.1f} {bottom:.1f}V{top:.1f}")
    return "".join(bars)


class _Box(NamedTuple):
    """What a label or a marker covers."""

    left: float
    right: float
    top: float
    bottom: float

    @classmethod
    def around(cls, a: float, b: float, width: float) -> "_Box":
        return cls(a - width / 2, a + width / 2, b - LINE / 2 + 1, b + LINE / 2 - 1)

    def meets(self, other: "_Box") -> bool:
        across = self.left < other.right and other.left < self.right
        return across and self.top < other.bottom and other.top < self.bottom


def _beside(a: float, b: float, width: float, taken: list[_Box]) -> Point:
    """The middle of a label at a point: the first place that is free, which is then taken."""
    right, left = a + 9 + width / 2, a - 9 - width / 2
    near = [(right, b), (right, b - 12), (right, b + 12), (left, b), (a, b - 16), (a, b + 16)]
    places = [*near, *((x, b + dy) for dy in (-24, 24, -36, 36) for x in (right, left))]
    place = next((at for at in places if not any(map(_Box.around(*at, width).meets, taken))), places[0])
    taken.append(_Box.around(*place, width))
    return place


def _apart(places: Sequence[float]) -> list[float]:
    """Sorted positions, moved so that labels at them do not overlap, and upwards again where they leave the axes."""
    moved, free = [], float(TOP)
    for place in places:
        moved.append(max(place, free))
        free = moved[-1] + LINE
    free = max(HEIGHT - BOTTOM, TOP + LINE * (len(places) - 1))
    for k in reversed(range(len(moved))):
        moved[k] = min(moved[k], free)
        free = moved[k] - LINE
    return moved
