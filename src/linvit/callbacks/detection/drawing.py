"""Boxes, masks, names and scores of objects drawn over a picture."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from linvit import coco_masks

OPACITY = 0.45  # of masks
FONT = 12  # pixels


def draw(picture: Image.Image, objects: Any, colours: np.ndarray, names: Sequence[str], threshold: float = 0.0) -> None:
    """Draws objects over a picture, the surest last.

    Args:
        picture: RGB, of any size: that of the objects need not be the same.
        objects: `size` (H, W) of the image, `boxes` in its pixels, `labels`, `rles`, and of detected ones `scores`.
        colours: Of the classes (K, 3), uint8.
        names: Of the classes.
        threshold: Objects of lower scores are left out.
    """
    scale = np.tile([picture.width / objects.size[1], picture.height / objects.size[0]], 2)
    scores = np.ones(len(objects.labels)) if objects.scores is None else objects.scores
    rles = objects.rles or [None] * len(scores)
    shown = [i for i in np.argsort(scores, kind="stable").tolist() if scores[i] >= threshold]
    for i in shown:
        if rles[i] is not None:
            _fill(picture, rles[i], tuple(colours[objects.labels[i]].tolist()))
    pen = ImageDraw.Draw(picture)
    for i in shown:
        label = int(objects.labels[i])
        crowd = " (crowd)" if objects.iscrowd is not None and objects.iscrowd[i] else ""
        score = "" if objects.scores is None else f" {objects.scores[i]:.2f}"
        box, colour = (objects.boxes[i] * scale).tolist(), tuple(colours[label].tolist())
        _frame(pen, picture.width, box, colour, names[label] + crowd + score)


def _fill(picture: Image.Image, rle: dict[str, Any], colour: tuple[int, ...]) -> None:
    """Lays a colour over the pixels of a mask."""
    mask = Image.fromarray(round(255 * OPACITY) * coco_masks.decode([rle])[0])
    picture.paste(Image.new("RGB", picture.size, colour), mask=mask.resize(picture.size, Image.Resampling.NEAREST))


def _frame(pen: ImageDraw.ImageDraw, width: int, box: Sequence[float], colour: tuple[int, ...], text: str) -> None:
    """Draws a box, and its text at its upper edge, inside of it at the upper edge of the picture of that width."""
    left, top, right, bottom = box
    pen.rectangle((left, top, max(left, right - 1), max(top, bottom - 1)), outline=colour, width=2)
    font = ImageFont.load_default(FONT)
    length = font.getlength(text) + 4
    place = (max(min(left, width - length), 0), top - FONT - 2 if top > FONT + 2 else top)
    pen.rectangle((*place, place[0] + length, place[1] + FONT + 2), colour)
    ink = "black" if np.dot(colour, (0.299, 0.587, 0.114)) > 140 else "white"
    pen.text((place[0] + 2, place[1] + FONT / 2 + 1), text, ink, font, anchor="lm")
