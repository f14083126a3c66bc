"""Plots: well-formed SVG that shows every series, also with nothing, one value, zeros and hostile names."""

import math
import re
import xml.etree.ElementTree as ET
from functools import partial

import pytest

from linvit.experiments.plots import Axis, Series, line_plot, small_multiples

scatter_plot = partial(line_plot, front=True)

TOKENS = Axis("tokens N", log=True, ticks=(196, 784, 3136))
TIME = Axis("time, ms", log=True)


def texts(svg):
    return ["".join(node.itertext()) for node in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_the_legend_has_every_curve_in_the_order_of_the_right_ends():
    values = {f"mechanism_{i}": (i * 7) % 17 + 1.0 for i in range(17)}
    series = [Series(name, ((196, 1.0), (784, 4.0), (3136, value))) for name, value in values.items()]
    svg = line_plot("Time", series, TOKENS, TIME, "1 core")
    assert [text for text in texts(svg) if text in values] == sorted(values, key=values.__getitem__, reverse=True)
    assert {"Time", "1 core", "tokens N (log scale)", "time, ms (log scale)", "196", "784", "3,136"} <= set(texts(svg))
    assert line_plot("Time", series, TOKENS, TIME, "1 core") == svg


def test_a_long_legend_stays_within_the_picture():
    series = [Series(f"mechanism_{i}", ((196, 1.0), (784, 1.0 + i))) for i in range(40)]
    picture = ET.fromstring(line_plot("Time", series, TOKENS, TIME))
    _, _, width, height = map(float, picture.get("viewBox").split())
    nodes = [
        node for node in picture.iter("{http://www.w3.org/2000/svg}text") if (node.text or "").startswith("mechanism")
    ]
    assert {node.text for node in nodes} == {one.name for one in series}
    assert all(0 < float(node.get("x")) < width and 0 < float(node.get("y")) < height for node in nodes)


def test_every_curve_of_small_multiples_is_named_once():
    series = [Series(f"mechanism_{i}", ((8, 1.0), (32, 0.1))) for i in range(9)]
    found = texts(small_multiples("T", series, Axis("n", log=True), Axis("y")))
    assert [text for text in found if text.startswith("mechanism")] == [one.name for one in series]


@pytest.mark.parametrize("draw", [line_plot, small_multiples])
@pytest.mark.parametrize(
    "points",
    [(), ((196, 0.0), (784, 0.0)), ((196, math.nan), (784, math.inf), (3136, 1e-7))],
    ids=["none", "zeros", "not finite"],
)
@pytest.mark.parametrize("log", [True, False])
def test_few_or_strange_values_are_drawn_within_the_picture(draw, points, log):
    svg = draw("T", [Series("<a> & 'b' $x$", points)], Axis("x", log), Axis("y", log))
    ET.fromstring(svg)
    assert not {"nan", "inf"} & set(re.findall(r"\w+", svg))
    assert ("<a> & 'b' $x$" in texts(svg)) == any(map(math.isfinite, (y for _, y in points if y or not log)))


def test_the_front_joins_what_nothing_beats():
    points = {"slow and good": (9, 80), "fast and bad": (1, 70), "beaten": (9.5, 75), "between": (5, 76)}
    series = [Series(name, (point,)) for name, point in points.items()]
    svg = scatter_plot("T", series, Axis("ms"), Axis("top-1, %"))
    (front,) = re.findall(r'd="([^"]+)"[^>]*style="fill: none; stroke: #cccccc', svg)
    assert front.count("L") == 2
    assert set(points) <= set(texts(svg))


def test_a_plot_follows_the_readers_choice_of_dark():
    points = Series("a", ((1, 2), (2, 3)))
    style, drawn = scatter_plot("T", [points], Axis("x"), Axis("y"), "note").split("</style>")
    replaced = re.findall(r'\[style\*="(.*?)"\]', style.partition("prefers-color-scheme: dark")[2])
    assert len(replaced) == 5
    assert [colour for colour in replaced if colour not in drawn] == []
