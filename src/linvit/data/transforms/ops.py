"""What is to be done to the pixels of one sample: drawn first, done by the loader process or on the device."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from linvit.data.transforms.affine import Matrix, warp
from linvit.data.transforms.geometry import Box
from linvit.data.transforms.pixel_ops import OPERATIONS

Fill = tuple[int, int, int]
BLACK: Fill = (0, 0, 0)


class Change(NamedTuple):
    """One of `OPERATIONS`, by an amount."""

    name: str
    amount: float


class Warp(NamedTuple):
    """An affine map, see `linvit.data.transforms.affine.warp`."""

    matrix: Matrix
    bicubic: bool
    fill: Fill


class Plan(NamedTuple):
    """What is left to do with a sample on the device.

    Attributes:
        key: Of the sample; seeds the noise that it is erased with.
        changes: In order; empty if the loader process has done them.
        erase: The box to be erased, or None.
    """

    key: int
    changes: tuple[Change | Warp, ...]
    erase: Box | None


class Plans:
    """The plans of a batch. Not a list or tuple: Lightning would search it, item by item, for tensors to move."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        self.plans = plans


def apply(changes: Sequence[Change | Warp], image: Tensor) -> Tensor:
    """Does the changes to one 8-bit image (3, H, W) on the CPU."""
    for change in changes:
        if isinstance(change, Warp):
            image = warp(image, *change)
        else:
            image = OPERATIONS[change.name](image[None], change.amount)[0]
    return image


def affine(angle: float, zoom: float, shift: tuple[float, float], size: tuple[int, int]) -> Matrix:
    """The matrix that turns about the centre, enlarges and then shifts an image of `size` (H, W).

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
