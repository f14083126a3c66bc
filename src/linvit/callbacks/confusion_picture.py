"""A confusion matrix as a picture: a row per label, a column per prediction, the darker the larger part of the row."""

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SIDE = 1200  # pixels of the matrix, about: cells of few classes are larger, within bounds
CELL = (30, 64)
GAP, TITLE = 8, 40  # pixels
LETTERS = 18  # of a name that are shown
GRID = (225, 225, 225)
DARK = 0.3  # fraction of a row from which numbers are white


def confusion_picture(
    labels: np.ndarray, predicted: np.ndarray, classes: int, names: Sequence[str] | None = None, most: int = 50
) -> Image.Image:
    """Draws the matrix of all classes, or of the most confused ones where there are more than fit.

    A cell has the number of images with a label and a prediction; its colour is their fraction of all images with that
    label. Most confused are the classes with the most wrong images, with that label or with that prediction. When
    classes are left out, a row need not add up. However many classes, the picture is smaller than 1800 x 1800 pixels.

    Args:
        labels: Classes of the images (n,).
        predicted: Their predicted classes (n,).
        classes: How many there are.
        names: Of the classes; None writes their indices.
        most: Classes in the picture.
    """
    wrong = labels != predicted
    errors = np.bincount(labels[wrong], minlength=classes) + np.bincount(predicted[wrong], minlength=classes)
    shown = _most(errors, most)
    place = np.full(classes, -1)
    place[shown] = np.arange(len(shown))
    row, column = place[labels], place[predicted]
    inside = (row >= 0) & (column >= 0)
    counts = np.zeros((len(shown), len(shown)), dtype=np.int64)
    np.add.at(counts, (row[inside], column[inside]), 1)
    return _draw(counts, np.bincount(labels, minlength=classes), shown, names, "images")


def matrix_picture(matrix: np.ndarray, names: Sequence[str] | None = None, most: int = 50) -> Image.Image:
    """Draws a confusion matrix of pixels (K, K), whose rows are labels, as `confusion_picture` draws one of images."""
    shown = _most(matrix.sum(0) + matrix.sum(1) - 2 * matrix.diagonal(), most)
    return _draw(matrix[np.ix_(shown, shown)], matrix.sum(1), shown, names, "pixels")


def _most(errors: np.ndarray, most: int) -> np.ndarray:
    """The classes with the most errors, in their order."""
    return np.sort(np.argsort(-errors, kind="stable")[:most])


def _draw(
    counts: np.ndarray, labelled: np.ndarray, shown: np.ndarray, names: Sequence[str] | None, unit: str
) -> Image.Image:
    """Draws the counts between the classes that are shown; `labelled` counts each of all classes."""
    fractions = counts / np.maximum(labelled[shown], 1)[:, None]
    names = [str(c) if names is None else names[c] for c in shown]
    most = f"the {len(shown)} most confused of " if len(shown) < len(labelled) else ""
    title = f"{most}{len(labelled)} classes. Rows: labels, columns: predictions, numbers: {unit}"
    cell = cell_side(len(names))
    font, small, heading = (ImageFont.load_default(size) for size in (cell * 0.4, cell * 0.36, 18))
    names = [name[:LETTERS] for name in names]
    side, margin = cell * len(names), math.ceil(max(map(font.getlength, names))) + 2 * GAP
    width = max(margin + side, math.ceil(heading.getlength(title)) + GAP) + GAP
    picture = Image.new("RGB", (width, TITLE + margin + side + GAP), "white")
    across = Image.new("RGB", (margin, side), "white")  # names of the columns, turned by a right angle
    draw, draw_across = ImageDraw.Draw(picture), ImageDraw.Draw(across)
    draw.text((GAP, TITLE / 2), title, "black", heading, anchor="lm")
    for i, name in enumerate(names):
        draw.text((margin - GAP, TITLE + margin + (i + 0.5) * cell), name, "black", font, anchor="rm")
        draw_across.text((GAP, (i + 0.5) * cell), name, "black", font, anchor="lm")
    picture.paste(
        across.transpose(Image.Transpose.TRANSPOSE).transpose(Image.Transpose.FLIP_TOP_BOTTOM), (margin, TITLE)
    )
    # Square root: one image in a hundred is still seen. White to dark blue.
    tone = np.sqrt(fractions)[..., None] * np.array([-247, -207, -148]) + 255
    cells = np.repeat(np.repeat(tone.astype(np.uint8), cell, 0), cell, 1)  # (side, side, 3)
    picture.paste(Image.fromarray(cells), (margin, TITLE + margin))
    for line in range(cell, side, cell):
        draw.line((margin + line, TITLE + margin, margin + line, TITLE + margin + side), GRID)
        draw.line((margin, TITLE + margin + line, margin + side, TITLE + margin + line), GRID)
    for row, column in np.argwhere(counts):
        centre = (margin + (column + 0.5) * cell, TITLE + margin + (row + 0.5) * cell)
        colour = "white" if fractions[row, column] > DARK else "black"
        draw.text(centre, _short(counts[row, column]), colour, small, anchor="mm")
    draw.rectangle((margin - 1, TITLE + margin - 1, margin + side, TITLE + margin + side), outline="grey")
    return picture


def cell_side(classes: int) -> int:
    """Pixels of a cell where so many classes are shown."""
    return min(max(SIDE // classes, CELL[0]), CELL[1])


def _short(count: int) -> str:
    """A number in at most five characters: 9999, 12k, 12M, 12G."""
    for unit, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= 10 * unit:
            return f"{count // unit}{letter}"
    return str(count)
