"""Affine maps of one 8-bit image: by PIL or, for shears and shifts, by faster code of our own.

PIL's affine transform reads 16 neighbours of every pixel. A shear or a shift moves pixels along rows or columns only: 4
neighbours do, and a copy moves whole runs of a row. That is two to three times as fast, with the pixels that PIL gives.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from linvit.data.transforms.pixel_ops import to_8_bits

Matrix = tuple[float, float, float, float, float, float]
"""(a, b, c, d, e, f): the output's (x, y) shows what was at (a x + b y + c, d x + e y + f); PIL's convention."""


def affine_matrix(angle: float, zoom: float, shift: tuple[float, float], size: tuple[int, int]) -> Matrix:
    """Returns the matrix that turns about the centre, enlarges and then shifts an image of `size` (H, W).

    Args:
        angle: Degrees, anticlockwise.
        zoom: Factor.
        shift: Pixels to the right and down.
        size: Of the image.
    """
    x, y = size[1] / 2, size[0] / 2
    a, b = math.cos(math.radians(angle)) / zoom, -math.sin(math.radians(angle)) / zoom
    from_x, from_y = x + shift[0], y + shift[1]
    return a, b, x - a * from_x - b * from_y, -b, a, y + b * from_x - a * from_y


def warp(image: Tensor, matrix: Matrix, bicubic: bool, fill: Sequence[int]) -> Tensor:
    """Maps an 8-bit image (3, H, W) as PIL does, which truncates results to whole numbers.

    Args:
        image: The pixels.
        matrix: From places in the output to places in the image, in pixels from the upper left corner.
        bicubic: Else bilinear.
        fill: Colour of what lies outside of the image.
    """
    a, b, c, d, e, f = matrix
    height, width = image.shape[1:]
    if (a, d, e, f) == (1, 0, 1, 0):
        return _move_rows(image, b * (np.arange(height) + 0.5) + c, bicubic, fill)
    if (a, b, c, e) == (1, 0, 0, 1):
        return _move_rows(image.mT, d * (np.arange(width) + 0.5) + f, bicubic, fill).mT.contiguous()
    mode = Image.Resampling.BICUBIC if bicubic else Image.Resampling.BILINEAR
    picture = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())  # (H, W, 3)
    turned = picture.transform((width, height), Image.Transform.AFFINE, matrix, mode, fillcolor=tuple(fill))
    return torch.from_numpy(np.array(turned)).permute(2, 0, 1).contiguous()


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
    width = image.shape[2]
    whole = np.floor(by)
    reach = min(int(np.abs(whole).max()), width) + 2
    left, right = image[:, :, :1], image[:, :, -1:]  # beyond the border the outermost pixel is repeated
    padded = torch.cat([left.expand(-1, -1, reach), image, right.expand(-1, -1, reach)], -1)
    near = _cut_rows(padded, whole.clip(-width, width) + (reach - 1), width + 3).float()  # one left to two right
    part = torch.from_numpy((by - whole).astype(np.float32))[:, None]  # (H, 1)
    moved = (_cubic if bicubic else _linear)(near, part)
    frame = np.zeros((4, 1, 3 * width), np.uint8)  # the fill about a hole as wide as the image, and a mask of that
    frame[:3] = np.reshape(fill, (3, 1, 1))
    frame[:, :, width:-width] = np.reshape([0, 0, 0, 255], (4, 1, 1))
    wide = torch.from_numpy(frame).expand(-1, len(by), -1)
    shown = _cut_rows(wide, np.floor(by + 0.5).clip(-width, width) + width, width)
    return to_8_bits(moved).bitwise_and_(shown[3]).bitwise_or_(shown[:3])


def _cut_rows(image: Tensor, first: np.ndarray, width: int) -> Tensor:
    """Cuts `width` values from each row of (C, H, W), beginning at `first` (H,); numpy copies row by row."""
    cut = image.unfold(-1, width, 1).numpy()[:, np.arange(len(first)), first.astype(int)]
    return torch.from_numpy(cut)


def _linear(near: Tensor, d: Tensor) -> Tensor:
    """Interpolates linearly between the second and the third of four neighbours; see `_cubic`."""
    v2, v3 = near[..., 1:-2], near[..., 2:-1]
    return (v3 - v2).mul_(d).add_(v2)


def _cubic(near: Tensor, d: Tensor) -> Tensor:
    """Interpolates by Keys' kernel with a = -1, PIL's choice, at d between the second and third of four neighbours.

    Like PIL's it is written in differences of neighbours, so that equal ones are reproduced exactly: the sum of four
    rounded weights is not 1, and a value a little below a whole number would lose a level.

    Args:
        near: Values (3, H, W + 3); the neighbours of place x are at x to x + 3.
        d: (H, 1), from 0 to 1.
    """
    v1, v2, v3, v4 = near[..., :-3], near[..., 1:-2], near[..., 2:-1], near[..., 3:]
    first, last = v1 - v2, v3 - v4
    quadratic = first.mul(2).add_(last)
    cubic = first.add_(last).neg_()
    return cubic.mul_(d).add_(quadratic).mul_(d).add_(v3 - v1).mul_(d).add_(v2)
