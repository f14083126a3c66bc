"""Photometric distortion (Liu et al. 2016, "SSD: Single Shot MultiBox Detector", as in mmsegmentation)."""

import numpy as np

from linvit.data.transforms.ops import PixelOp

BRIGHTNESS = 32  # brightness changes by at most so many of the 256 levels
FACTORS = (0.5, 1.5)  # of contrast and saturation
HUES = 18  # the hue turns by less than so many of the 180 steps of 8-bit HSV


def photometric_distortion(rng: np.random.Generator) -> list[PixelOp]:
    """Draws changes of brightness, contrast, saturation and hue, each with probability 0.5.

    The contrast is changed either before or after the colours. Each operation truncates to 8 bits.
    """
    ops: list[PixelOp] = []
    if rng.random() < 0.5:
        ops.append(PixelOp("shift", rng.uniform(-BRIGHTNESS, BRIGHTNESS)))
    contrast_first = rng.random() < 0.5
    contrast = [PixelOp("brightness", rng.uniform(*FACTORS))] if rng.random() < 0.5 else []  # a factor: about black
    if contrast_first:
        ops += contrast
    if rng.random() < 0.5:
        ops.append(PixelOp("saturation", rng.uniform(*FACTORS)))
    if rng.random() < 0.5:
        ops.append(PixelOp("hue", 2.0 * rng.integers(-HUES, HUES)))  # degrees
    return ops if contrast_first else ops + contrast
