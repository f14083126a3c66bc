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


class Op(NamedTuple):
    """One of `OPERATIONS`, by an amount."""

    name: str
    amount: float


class Warp(NamedTuple):
    """An affine map, see `linvit.data.transforms.affine.warp`."""

    matrix: Matrix
    bicubic: bool
    fill: Fill


class DeviceOps(NamedTuple):
    """What is left to do with a sample on the device.

    Attributes:
        seed: Of the sample; the noise that erases a box of it follows from it.
        ops: In order; empty if the loader process has done them.
        erase: The box to be erased, or None.
    """

    seed: int
    ops: tuple[Op | Warp, ...]
    erase: Box | None


class BatchDeviceOps:
    """The device ops of a batch. Not a list or tuple: Lightning would search it, item by item, for tensors to move."""

    def __init__(self, samples: Sequence[DeviceOps]) -> None:
        self.samples = samples


def apply(ops: Sequence[Op | Warp], image: Tensor) -> Tensor:
    """Does the operations to one 8-bit image (3, H, W) on the CPU."""
    for op in ops:
        image = warp(image, *op) if isinstance(op, Warp) else OPERATIONS[op.name](image[None], op.amount)[0]
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
