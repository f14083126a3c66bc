"""Numbers as colours: a table of them as a picture, and the colours of maps."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
from PIL import Image, ImageDraw, ImageFont

CELL = (52, 26)  # pixels
GAP, TITLE = 8, 34  # pixels


class Paper(NamedTuple):
    """The colours of a picture's background, of its text, and of a cell without a value."""

    back: str
    ink: str
    missing: tuple[int, int, int]


LIGHT = Paper("white", "black", (225, 225, 225))
DARK = Paper("#161b20", "#e4e7ea", (58, 66, 74))


def colours(values: np.ndarray, paper: Paper = LIGHT) -> np.ndarray:
    """Colours (..., 3), uint8, of values between 0 and 1: viridis; grey where there is none (NaN)."""
    found: np.ndarray = mpl.colormaps["viridis"](values, bytes=True)[..., :3]
    found[np.isnan(values)] = paper.missing
    return found


def heat_map(
    values: np.ndarray,
    rows: Sequence[str],
    columns: Sequence[str],
    title: str,
    note: str = "",
    paper: Paper = LIGHT,
) -> Image.Image:
    """Draws a table (rows, columns) of numbers with their colours, from 0 to the largest; NaN is an empty grey cell.

    Under it stand the names of the columns, whose lines are of equal number, and the note, such as date and machine.
    Pillow draws 12 layers at 40 steps in 0.04 s, matplotlib in 0.8; what a callback draws counts as its share of the
    training time.
    """
    font, heading = ImageFont.load_default(13), ImageFont.load_default(16)
    lines = [name.split("\n") for name in columns]
    texts = [math.ceil(font.getlength(line)) + GAP for parts in lines for line in parts]
    width, height, depth = max([CELL[0], *texts]), CELL[1], max(map(len, lines), default=1)
    margin = math.ceil(max(map(font.getlength, rows), default=0)) + 2 * GAP
    size = (
        max(
            margin + width * len(columns),
            *(math.ceil(f.getlength(t)) + GAP for f, t in ((heading, title), (font, note))),
        )
        + GAP,
        TITLE + height * (len(rows) + depth + bool(note)) + GAP,
    )
    picture = Image.new("RGB", size, paper.back)
    draw = ImageDraw.Draw(picture)
    draw.text((GAP, TITLE / 2), title, paper.ink, heading, anchor="lm")
    finite = values[np.isfinite(values)]
    fractions = values / max(finite.max(initial=0), np.finfo(float).tiny)
    for i, name in enumerate(rows):
        top = TITLE + i * height
        draw.text((margin - GAP, top + height / 2), name, paper.ink, font, anchor="rm")
        for j, colour in enumerate(colours(fractions[i], paper)):
            left = margin + j * width
            draw.rectangle((left, top, left + width - 2, top + height - 2), tuple(map(int, colour)))
            if np.isfinite(values[i, j]):
                ink = "black" if fractions[i, j] > 0.6 else "white"
                draw.text((left + width / 2, top + height / 2), f"{values[i, j]:.4g}", ink, font, anchor="mm")
    for j, parts in enumerate(lines):
        for k, line in enumerate(parts):
            place = (margin + (j + 0.5) * width, TITLE + (len(rows) + k + 0.5) * height)
            draw.text(place, line, paper.ink, font, anchor="mm")
    draw.text((GAP, TITLE + (len(rows) + depth + 0.5) * height), note, "grey", font, anchor="lm")
    return picture
