"""A confusion matrix as a picture: labels down, predictions across, the darker the more of the row."""

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

CELL, GAP, TITLE = 14, 5, 22  # pixels
LETTERS = 18  # of a name that are shown


def confusion_picture(
    labels: np.ndarray, predicted: np.ndarray, classes: int, names: Sequence[str] | None = None, most: int = 50
) -> Image.Image:
    """Draws the matrix of all classes, or of the most confused ones where there are more than fit.

    Most confused are those with the most wrong images, be they of the class or taken for it. Shares are of all images
    of a row's class, so a row need not add up when classes are left out. However many classes, the picture stays below
    1000 x 1000 pixels.

    Args:
        labels: Classes of the images (n,).
        predicted: What they were taken for (n,).
        classes: How many there are.
        names: Of the classes; None writes their indices.
        most: Classes in the picture.
    """
    wrong = labels != predicted
    errors = np.bincount(labels[wrong], minlength=classes) + np.bincount(predicted[wrong], minlength=classes)
    shown = np.sort(np.argsort(-errors, kind="stable")[:most])
    place = np.full(classes, -1)
    place[shown] = np.arange(len(shown))
    row, column = place[labels], place[predicted]
    inside = (row >= 0) & (column >= 0)
    counts = np.zeros((len(shown), len(shown)))
    np.add.at(counts, (row[inside], column[inside]), 1)
    images = np.bincount(labels, minlength=classes)[shown]
    shares = counts / np.maximum(images, 1)[:, None]
    title = f"{len(shown)} most confused of {classes} classes" if len(shown) < classes else f"{classes} classes"
    return _draw(
        shares, [str(c) if names is None else names[c] for c in shown], f"{title}; down: label, across: prediction"
    )


def _draw(shares: np.ndarray, names: Sequence[str], title: str) -> Image.Image:
    names, font = [name[:LETTERS] for name in names], ImageFont.load_default(10)
    side, margin = CELL * len(names), math.ceil(max(map(font.getlength, names))) + 2 * GAP
    picture = Image.new("RGB", (max(margin + side, 300) + GAP, TITLE + margin + side + GAP), "white")
    across = Image.new("RGB", (margin, side), "white")  # names of the columns, turned by a right angle
    draw, draw_across = ImageDraw.Draw(picture), ImageDraw.Draw(across)
    draw.text((GAP, GAP), title, "black", font)
    for i, name in enumerate(names):
        draw.text((margin - GAP, TITLE + margin + i * CELL + 1), name, "black", font, anchor="ra")
        draw_across.text((GAP, i * CELL + 1), name, "black", font)
    picture.paste(
        across.transpose(Image.Transpose.TRANSPOSE).transpose(Image.Transpose.FLIP_TOP_BOTTOM), (margin, TITLE)
    )
    # Square root: one image in a hundred is still seen. White to dark blue.
    tone = np.sqrt(shares)[..., None] * np.array([-247, -207, -148]) + 255
    cells = np.repeat(np.repeat(tone.astype(np.uint8), CELL, 0), CELL, 1)  # (side, side, 3)
    picture.paste(Image.fromarray(cells), (margin, TITLE + margin))
    draw.rectangle((margin - 1, TITLE + margin - 1, margin + side, TITLE + margin + side), outline="grey")
    return picture
