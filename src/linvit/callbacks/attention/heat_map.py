"""Numbers as colours: a table of them as a picture, and the colours of maps."""

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

CELL = (52, 26)  # pixels
GAP, TITLE = 8, 34  # pixels
COLOURS = np.array(  # dark blue, teal, green, yellow: as light as large, and told apart by the colour-blind
    [(68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37)], dtype=float
)
MISSING = (225, 225, 225)


def colours(values: np.ndarray) -> np.ndarray:
    """Colours (..., 3), uint8, of values between 0 and 1; grey where there is none (NaN)."""
    place = np.clip(np.nan_to_num(values), 0, 1) * (len(COLOURS) - 1)
    channels = [np.interp(place, np.arange(len(COLOURS)), COLOURS[:, channel]) for channel in range(3)]
    found = np.stack(channels, -1).round().astype(np.uint8)
    found[np.isnan(values)] = MISSING
    return found


def heat_map(values: np.ndarray, rows: Sequence[str], columns: Sequence[str], title: str) -> Image.Image:
    """Draws a table (rows, columns) of numbers with their colours, from 0 to the largest; NaN is an empty grey cell."""
    font, heading = ImageFont.load_default(13), ImageFont.load_default(16)
    width, height = max([CELL[0], *(math.ceil(font.getlength(name)) + GAP for name in columns)]), CELL[1]
    margin = math.ceil(max(map(font.getlength, rows), default=0)) + 2 * GAP
    size = (
        max(margin + width * len(columns), math.ceil(heading.getlength(title)) + GAP) + GAP,
        TITLE + height * (len(rows) + 1) + GAP,
    )
    picture = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(picture)
    draw.text((GAP, TITLE / 2), title, "black", heading, anchor="lm")
    finite = values[np.isfinite(values)]
    fractions = values / max(finite.max(initial=0), np.finfo(float).tiny)
    for i, name in enumerate(rows):
        top = TITLE + i * height
        draw.text((margin - GAP, top + height / 2), name, "black", font, anchor="rm")
        for j, colour in enumerate(colours(fractions[i])):
            left = margin + j * width
            draw.rectangle((left, top, left + width - 2, top + height - 2), tuple(map(int, colour)))
            if np.isfinite(values[i, j]):
                ink = "black" if fractions[i, j] > 0.6 else "white"
                draw.text((left + width / 2, top + height / 2), f"{values[i, j]:.4g}", ink, font, anchor="mm")
    for j, name in enumerate(columns):
        place = (margin + (j + 0.5) * width, TITLE + (len(rows) + 0.5) * height)
        draw.text(place, name, "black", font, anchor="mm")
    return picture
