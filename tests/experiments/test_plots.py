"""Plots: well-formed SVG that shows every series, also with nothing, one value, zeros and hostile names."""

import itertools
import math
import re
import xml.etree.ElementTree as ET

import pytest

from linvit.experiments.plot_frame import HEIGHT, WIDTH
from linvit.experiments.plots import Axis, Series, line_plot, scatter_plot

TOKENS = Axis("tokens N", log=True, ticks=(196, 784, 3136))
TIME = Axis("time, ms", log=True)


def texts(svg):
    return ["".join(node.itertext()) for node in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_every_curve_is_labelled_and_no_label_covers_another():
    names = [f"mechanism_{i}" for i in range(17)]
    svg = line_plot("Time", [Series(n, ((196, 1.0), (784, 4.0), (3136, 16.01))) for n in names], TOKENS, TIME, "1 core")
    assert set(names) <= set(texts(svg))
    heights = sorted(float(y) for y in re.findall(r'y="([\d.]+)" fill="#\w+">mechanism', svg))
    assert min(b - a for a, b in itertools.pairwise(heights)) >= 14.9
    assert {"Time", "1 core", "tokens N (log scale)", "time, ms (log scale)", "196", "784", "3,136"} <= set(texts(svg))
    looks = re.findall(r'<g stroke="(#\w+)".*?</title>\n<path d="\S.*?" stroke-dasharray="(.*?)"', svg)
    assert len(set(looks)) == 17


@pytest.mark.parametrize("draw", [line_plot, scatter_plot])
@pytest.mark.parametrize(
    "points",
    [(), ((196, 1.0),), ((196, 0.0), (784, 0.0)), ((196, math.nan), (784, math.inf), (3136, 1e-7))],
    ids=["none", "one", "zeros", "not finite"],
)
@pytest.mark.parametrize("log", [True, False])
def test_few_or_strange_values_are_drawn_within_the_picture(draw, points, log):
    svg = draw("T", [Series("<a> & 'b'", points)], Axis("x", log), Axis("y", log))
    ET.fromstring(svg)
    assert "nan" not in svg
    assert "inf" not in svg
    for x, y in re.findall(r"translate\(([-\d.]+) ([-\d.]+)\) rotate", svg) + re.findall(
        r"[ML]([-\d.]+) ([-\d.]+)", svg
    ):
        assert -10 <= float(x) <= WIDTH
        assert -10 <= float(y) <= HEIGHT


def test_the_front_joins_what_nothing_beats():
    points = {"slow and good": (9, 80), "fast and bad": (1, 70), "beaten": (9.5, 75), "between": (5, 76)}
    series = [Series(name, (point,)) for name, point in points.items()]
    svg = scatter_plot("T", series, Axis("ms"), Axis("top-1, %"), front=True)
    (front,) = re.findall(r'd="(\S[^"]+)" fill="none" stroke="#ccc"', svg)
    assert front.count("L") == 2
    assert set(points) <= set(texts(svg))
