"""Affine maps of one image: by PIL or, for shears and shifts, by faster code of our own.

PIL's affine transform reads 16 neighbours of every pixel. A shear or a shift moves pixels along rows or columns only: 4
neighbours do, and a copy moves whole runs of a row. That is two to three times as fast, with the pixels that PIL gives.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from PIL import Image
from torch import Tensor

from linvit.data.transforms.pixel_ops import from_pil, to_pil

BITS = 22  # of fractions in int32: 255 * 1.25, the largest sum of an interpolation, needs 9, and one is the sign
Matrix = tuple[float, float, float, float, float, float]
"""(a, b, c, d, e, f): the output's (x, y) shows what was at (a x + b y + c, d x + e y + f); PIL's convention."""


def affine_matrix(angle: float, zoom: float, shift: tuple[float, float], size: tuple[int, int]) -> Matrix:
    """The matrix that turns an image (H, W) about its centre, anticlockwise by degrees, enlarges and shifts it.

    The shift is in pixels to the right and down.
    """
    x, y = size[1] / 2, size[0] / 2
    a, b = math.cos(math.radians(angle)) / zoom, -math.sin(math.radians(angle)) / zoom
    from_x, from_y = x + shift[0], y + shift[1]
    return a, b, x - a * from_x - b * from_y, -b, a, y + b * from_x - a * from_y


def warp(image: Tensor, matrix: Matrix, bicubic: bool, fill: Sequence[int]) -> Tensor:
    """Maps an image (C, H, W) as PIL does, bicubically or bilinearly, truncating results of 8-bit images.

    What lies outside of the image gets the colour `fill`.
    """
    a, b, c, d, e, f = matrix
    height, width = image.shape[1:]
    fill = [*fill] if len(fill) == len(image) else [*fill] * len(image)
    mode = Image.Resampling.BICUBIC if bicubic else Image.Resampling.BILINEAR
    if image.dtype != torch.uint8 or len(image) != 3:
        planes = [Image.fromarray(plane) for plane in image.numpy()]
        moved = [
            plane.transform((width, height), Image.Transform.AFFINE, matrix, mode, fillcolor=colour)
            for plane, colour in zip(planes, fill, strict=True)
        ]
        return torch.from_numpy(np.stack([np.asarray(plane) for plane in moved]))
    if (a, d, e, f) == (1, 0, 1, 0):
        return _move_rows(image, b * (np.arange(height) + 0.5) + c, bicubic, fill)
    if (a, b, c, e) == (1, 0, 0, 1):
        return _move_rows(image.mT, d * (np.arange(width) + 0.5) + f, bicubic, fill).mT.contiguous()
    return from_pil(
        to_pil(image).transform((width, height), Image.Transform.AFFINE, matrix, mode, fillcolor=tuple(fill))
    )


def warp_mask(mask: Tensor, matrix: Matrix, fill: int) -> Tensor:
    """Maps labels (..., H, W): each pixel takes the label of the place that it shows, or `fill` if that is outside."""
    a, b, c, d, e, f = matrix
    height, width = mask.shape[-2:]
    x, y = np.arange(width) + 0.5, np.arange(height)[:, None] + 0.5  # centres of pixels
    columns, rows = np.floor(a * x + b * y + c), np.floor(d * x + e * y + f)  # (H, W)
    inside = (columns >= 0) & (columns < width) & (rows >= 0) & (rows < height)
    places = np.where(inside, rows * width + columns, 0).astype(np.int64)
    return mask.flatten(-2)[..., torch.from_numpy(places)].masked_fill(torch.from_numpy(~inside), fill)


def warp_boxes(boxes: Tensor, matrix: Matrix) -> Tensor:
    """Returns the boxes (N, 4), in pixels, around the four moved corners of each box; they may leave the image."""
    a, b, c, d, e, f = matrix
    inverse = torch.linalg.inv(torch.tensor([[a, b], [d, e]], dtype=torch.float64))
    x, y = boxes.double()[:, [0, 2, 0, 2]] - c, boxes.double()[:, [1, 1, 3, 3]] - f  # (N, 4 corners)
    corners = torch.stack([x, y], -1) @ inverse.mT  # (N, 4, 2)
    return torch.cat([corners.amin(1), corners.amax(1)], -1).to(boxes.dtype)


def _move_rows(image: Tensor, by: np.ndarray, bicubic: bool, fill: Sequence[int]) -> Tensor:
    """Moves the rows of an image (3, H, W): row y of the result shows at x what was at x + by[y]."""
    channels, height, width = image.shape
    whole = np.floor(by)
    weights = _weights(by - whole, bicubic)  # (taps, H, 1)
    taps = len(weights)
    # All rows in one line, with two more of the outermost pixels at either side; what is cut from beyond is not shown.
    line = np.empty(2 * width + channels * height * (width + 4), np.uint8)
    rows = line[width:-width].reshape(channels, height, width + 4)
    rows[..., 2:-2], rows[..., :2], rows[..., -2:] = image, image[..., :1], image[..., -1:]
    starts = width + np.arange(channels * height).reshape(channels, height) * (width + 4)
    near = _cut(line, starts + whole.clip(-width, width) + (3 - taps // 2), width + taps - 1).int()
    moved = near[..., :width] * weights[0]
    for tap in range(1, taps):
        moved.addcmul_(near[..., tap : tap + width], weights[tap])
    moved = moved.bitwise_right_shift_(BITS).clamp_(0, 255).to(torch.uint8)
    hole = np.zeros(3 * width, np.uint8)
    hole[width:-width] = 255  # where the image is seen; the fill is on either side of it
    seen = _cut(hole, np.floor(by + 0.5).clip(-width, width) + width, width)
    colour = torch.tensor(fill, dtype=torch.uint8).view(3, 1, 1)
    return moved.bitwise_xor_(colour).bitwise_and_(seen).bitwise_xor_(colour)


def _cut(line: np.ndarray, starts: np.ndarray, width: int) -> Tensor:
    """Cuts `width` values from a line at each of `starts`, (...) to (..., width); numpy copies run by run."""
    return torch.from_numpy(sliding_window_view(line, width)[starts.astype(np.intp)])


def _weights(d: np.ndarray, bicubic: bool) -> Tensor:
    """Weights of the 4 or 2 neighbours of a place at d (H,), from 0 to 1, between the two in the middle.

    Keys' kernel has a = -1, PIL's choice. The weights are whole numbers, int32 (4 or 2, H, 1), and their sum is
    2**BITS, so that equal neighbours are reproduced exactly.
    """
    others = [((2 - d) * d - 1) * d, 0 * d, ((1 - d) * d + 1) * d, (d - 1) * d * d] if bicubic else [0 * d, d]
    weights = np.rint(np.stack(others) * 2**BITS).astype(np.int32)
    weights[len(others) // 2 - 1] = 2**BITS - weights.sum(0)
    return torch.from_numpy(weights)[..., None]
