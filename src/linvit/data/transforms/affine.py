"""Affine maps of one image by PIL, of its labels and of its boxes."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

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
    mode = Image.Resampling.BICUBIC if bicubic else Image.Resampling.BILINEAR
    size = image.shape[2], image.shape[1]
    fill = fill if len(fill) > 1 else [*fill] * len(image)

    def moved(pixels: np.ndarray, colour: Any) -> np.ndarray:
        picture = Image.fromarray(pixels)
        return np.array(picture.transform(size, Image.Transform.AFFINE, matrix, mode, fillcolor=colour))

    if image.dtype == torch.uint8 and len(image) == 3:  # all channels at once take less time
        return torch.from_numpy(moved(image.permute(1, 2, 0).numpy(), tuple(fill))).permute(2, 0, 1)
    planes = [moved(plane, colour) for plane, colour in zip(image.numpy(), fill, strict=True)]
    return torch.from_numpy(np.stack(planes))


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
