"""Classes as colours: palettes, pictures with classes laid over them, and their legend."""

from collections.abc import Sequence

import numpy as np
from lightning.pytorch import Trainer
from PIL import Image, ImageDraw, ImageFont

OPACITY = 0.6  # of the colours over a picture
SWATCH, LINE, GAP = 14, 20, 6  # pixels of a legend


def palette(classes: int) -> np.ndarray:
    """A colour for each class (K, 3), uint8: PASCAL VOC's, which spreads the bits of a number over the three channels.

    The first colour, black there, is a grey, so that class 0 is seen over a dark picture.
    """
    numbers = np.arange(classes)
    colours = np.zeros((classes, 3), dtype=np.uint8)
    for bit in range(8):
        for channel in range(3):
            colours[:, channel] |= (((numbers >> (3 * bit + channel)) & 1) << (7 - bit)).astype(np.uint8)
    colours[0] = 96
    return colours


def class_palette(trainer: Trainer, classes: int) -> np.ndarray:
    """A colour for each class (K, 3), uint8: that of the data's masks if they have colours, or one of `palette`."""
    given = getattr(trainer.datamodule, "class_colours", None)  # type: ignore[attr-defined]
    return palette(classes) if given is None or len(given) != classes else np.array(given, dtype=np.uint8)


def overlay(picture: np.ndarray, classes: np.ndarray, colours: np.ndarray) -> np.ndarray:
    """A picture (H, W, 3), uint8, with the colours of classes (H, W) over it; pixels of no class stay as they are."""
    known = classes < len(colours)
    mixed = (1 - OPACITY) * picture + OPACITY * colours[np.where(known, classes, 0)]
    return np.where(known[..., None], mixed.round().astype(np.uint8), picture)


def legend(colours: np.ndarray, names: Sequence[str], width: int) -> Image.Image:
    """A picture of that width with a swatch and the name of each class, in as many columns as fit."""
    font = ImageFont.load_default(12)
    column = SWATCH + 3 * GAP + max((int(font.getlength(name)) for name in names), default=0)
    columns = max(width // column, 1)
    rows = -(-len(names) // columns)
    picture = Image.new("RGB", (width, rows * LINE + GAP), "white")
    draw = ImageDraw.Draw(picture)
    for i, (name, colour) in enumerate(zip(names, colours.tolist(), strict=True)):
        left, top = i % columns * column + GAP, i // columns * LINE + GAP
        draw.rectangle((left, top, left + SWATCH, top + SWATCH), tuple(colour), "grey")
        draw.text((left + SWATCH + GAP, top + SWATCH / 2), name, "black", font, anchor="lm")
    return picture
