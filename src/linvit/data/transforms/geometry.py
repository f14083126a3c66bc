"""Which part of an image is kept, and at which size."""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

CropMode = Literal["center", "squash", "border"]


class Box(NamedTuple):
    """A rectangle of pixels."""

    top: int
    left: int
    height: int
    width: int


def resize(image: Tensor, size: Sequence[int], interpolation: str = "bicubic") -> Tensor:
    """Resizes 8-bit (3, H, W) to `size` (H, W), antialiased, rows first: equal to PIL's two passes to two levels.

    Pillow 13 begins with the columns where that is less work, as where the height shrinks and the width grows. There
    bicubic differs, since each pass clips what overshoots: by up to 5 levels on photographs, by 30 on noise.
    """
    if tuple(image.shape[1:]) == tuple(size):
        return image
    return F.interpolate(image[None], list(size), mode=interpolation, antialias=True)[0]


def cut(image: Tensor, box: Box) -> Tensor:
    """The pixels of a box, without copying."""
    return image[:, box.top : box.top + box.height, box.left : box.left + box.width]


def centre(height: int, width: int, box_height: int, box_width: int) -> Box:
    """A box in the middle, as torchvision rounds it."""
    return Box(round((height - box_height) / 2), round((width - box_width) / 2), box_height, box_width)


def random_box(
    rng: np.random.Generator, height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float]
) -> Box:
    """The box of a random resized crop (Szegedy et al. 2015), as torchvision and timm draw it.

    Args:
        rng: Numbers of the sample.
        height: Of the image.
        width: Of the image.
        scale: Range of the area as a fraction of the image's, uniform.
        ratio: Range of width over height, uniform in the logarithm.
    """
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(10):
        area = height * width * rng.uniform(*scale)
        aspect = math.exp(rng.uniform(low, high))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return Box(int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1)), h, w)
    aspect = min(max(width / height, ratio[0]), ratio[1])  # none fitted: the largest with an allowed aspect
    w, h = min(width, round(height * aspect)), min(height, round(width / aspect))
    return Box((height - h) // 2, (width - w) // 2, h, w)


def cover(height: int, width: int, target: Sequence[int]) -> tuple[int, int]:
    """The smallest size of the same aspect that covers `target` (H, W); sides are cut to whole pixels as timm cuts."""
    if target[0] * width <= target[1] * height:  # the width decides
        return max(target[0], target[1] * height // width), target[1]
    return target[0], max(target[1], target[0] * width // height)


def evaluation_view(
    image: Tensor, size: tuple[int, int], crop_mode: CropMode, crop_pct: float, fill: Sequence[int] = (0, 0, 0)
) -> Tensor:
    """What evaluation sees of an image, resized bicubically; the modes are timm's.

    Args:
        image: 8-bit pixels (3, H, W).
        size: Wanted (H, W).
        crop_mode: "center" resizes until the image covers `size / crop_pct` and keeps its aspect; "squash" resizes to
            `size / crop_pct` whatever the aspect; "border" resizes until the image fits into `size / crop_pct`, keeps
            its aspect, and pads what is missing. All take the centre of the result.
        crop_pct: Fraction of the resized side that is kept.
        fill: Colour of the padding of "border".
    """
    target = math.floor(size[0] / crop_pct), math.floor(size[1] / crop_pct)
    if crop_mode == "center":
        target = cover(image.shape[1], image.shape[2], target)
    elif crop_mode == "border":
        target = fit(image.shape[1], image.shape[2], target)
    return center_crop_or_pad(resize(image, target), size, fill)


def fit(height: int, width: int, target: Sequence[int]) -> tuple[int, int]:
    """The largest size of the same aspect that fits into `target` (H, W), rounded as timm rounds it."""
    ratio = max(height / target[0], width / target[1])
    return max(1, round(height / ratio)), max(1, round(width / ratio))


def center_crop_or_pad(image: Tensor, size: Sequence[int], fill: Sequence[int]) -> Tensor:
    """The middle of an image (3, H, W) at `size` (H, W); sides that are too short are padded with a colour."""
    height, width = image.shape[1:]
    down, across = max(size[0] - height, 0), max(size[1] - width, 0)
    if down or across:
        padded = torch.tensor(fill, dtype=image.dtype).view(3, 1, 1).repeat(1, height + down, width + across)
        padded[:, down // 2 : down // 2 + height, across // 2 : across // 2 + width] = image
        image = padded
    return cut(image, centre(*image.shape[1:], *size))
