"""Draws docs/results/linearized.svg from the table of docs/results/linearize.md: `python benchmarks/linearized.py`.

Each line leads from an attention trained from random weights to the same one in a copy of a trained softmax network.
"""

import re
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from linvit.experiments.plots import COLOURS, STYLE, svg

RESULTS = Path(__file__).parents[1] / "docs" / "results"
TEACHER = 0.975
CELL = re.compile(r"([\d.]+) ± ([\d.]+)")


def table() -> list[tuple[str, list[float]]]:
    """Names, with means and spreads from random weights (the column `nothing`) and with all weights copied (`all`)."""
    text = (RESULTS / "linearize.md").read_text(encoding="utf-8").partition("| attention | nothing | ")[2]
    rows = [line.strip("| ").split(" | ") for line in text.partition("\n\n")[0].splitlines()[2:]]
    return [
        (name.replace("`", ""), [float(x) for cell in (cells[0], cells[6]) for x in CELL.fullmatch(cell).groups()])
        for name, *cells in rows
        if name != "mean"
    ]


def picture() -> str:
    """The text of the picture."""
    rows = sorted(table(), key=lambda row: row[1][2])
    with mpl.rc_context(STYLE):
        figure = Figure((9, 4.6))
        axes = figure.subplots()
        for i, (_, (random, low, copied, high)) in enumerate(rows):
            axes.plot([random, copied], [i, i], color="#cccccc", linewidth=2, zorder=1)
            axes.errorbar(random, i, xerr=low, color=COLOURS[1], marker="o", markerfacecolor="none", capsize=2)
            axes.errorbar(copied, i, xerr=high, color=COLOURS[0], marker="o", capsize=2)
        axes.axvline(TEACHER, color="#000000", linewidth=1, linestyle="--")
        axes.set_yticks(range(len(rows)), [name for name, _ in rows])
        axes.set_xlim(0.2, 1.0)
        axes.set_xlabel("top-1 on the digits after 5 epochs, mean and standard deviation of 3 seeds")
        top = len(rows) - 0.3
        axes.text(0.45, top, "from random weights", color=COLOURS[1], ha="center")
        axes.text(0.81, top, "with softmax's weights", color=COLOURS[0], ha="center")
        axes.text(TEACHER, top, "softmax", ha="center")
        return svg(figure)


if __name__ == "__main__":
    (RESULTS / "linearized.svg").write_text(picture(), encoding="utf-8")
