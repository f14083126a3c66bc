"""Resizes tables with one row per token from the grid of a checkpoint to that of a model."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from linvit.attention.ops.functional import resize_tokens

SizeOf = Callable[[int], tuple[int, int] | None]
"""The patch grid (H, W) that so many patches had in a checkpoint, or None if it is not known."""


def grid_from_count(count: int, img_size: tuple[int, int]) -> tuple[int, int] | None:
    """The grid (H, W) of an image with `count` patches; None if the image has no such grid.

    H and W are the sides of the image divided by some patch size, both rounded up (padded images) or both rounded down
    (cropped images). An image size of (1, 1) stands for all square images, whose grids are square.
    """
    for height in range(1, count + 1):
        width, rest = divmod(count, height)
        if rest:
            continue
        # The patch size lies in [exact, above) if sides are rounded up, and in (below, exact] if they are rounded down.
        counts = tuple(zip(img_size, (height, width), strict=True))
        exact = [side / n for side, n in counts]
        above = [side / (n - 1) if n > 1 else math.inf for side, n in counts]
        below = [side / (n + 1) for side, n in counts]
        if max(exact) < min(above) or max(below) < min(exact):
            return height, width
    return None


def resize_table(given: Tensor, own: Tensor, size: tuple[int, int], size_of: SizeOf, mode: str = "bicubic") -> Tensor:
    """A table (1, N', C) or (N', C) of a checkpoint for the grid (H, W) of a model, of the shape of the model's `own`.

    Rows of prefix tokens come first, then one per patch, row by row; what the checkpoint lacks of the former is taken
    from the model's, what it has beyond them is left out. A table of that grid, or one that does not fit, is returned
    as it is. `mode` is "bicubic" or "bilinear".
    """
    if given.ndim < 2 or (*given.shape[:-2], given.shape[-1]) != (*own.shape[:-2], own.shape[-1]):
        return given
    rows, prefix = given.shape[-2], own.shape[-2] - math.prod(size)
    for extra in (prefix,) if rows == own.shape[-2] else (prefix, 0, 1, 2):
        old = size_of(rows - extra) if rows > extra else None
        if old is not None:
            break
    if old is None or (old, extra) == (size, prefix):
        return given
    shared = min(extra, prefix)
    lacking = own[..., shared:prefix, :].to(given)
    patches = resize_tokens(given[..., extra:, :].reshape(1, -1, given.shape[-1]), old, size, mode)
    return torch.cat([given[..., :shared, :], lacking, patches.reshape(*own.shape[:-2], *patches.shape[1:])], dim=-2)
