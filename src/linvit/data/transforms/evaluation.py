"""How an image is resized and cropped to be evaluated, in timm's words: crop_mode and crop_pct."""

import math
from collections.abc import Sequence

from linvit.data.transforms.geometry import Box, Crop, CropMode, Pad, Resize
from linvit.data.transforms.ops import BLACK, Fill, Op


def evaluation_ops(
    shape: Sequence[int], size: tuple[int, int], crop_mode: CropMode, crop_pct: float, fill: Fill = BLACK
) -> list[Op]:
    """The operations that resize (bicubically) and crop an image (H, W) for evaluation to `size`.

    For the modes see `ClassificationData`; "border" pads with the colour `fill`.
    """
    height, width = shape
    target = math.floor(size[0] / crop_pct), math.floor(size[1] / crop_pct)
    if crop_mode == "center":
        target = cover(height, width, target)
    elif crop_mode == "border":
        target = fit(height, width, target)
    down, across = max(size[0] - target[0], 0), max(size[1] - target[1], 0)
    pad = Pad(across // 2, down // 2, across - across // 2, down - down // 2, fill)
    crop = Crop(centre(target[0] + down, target[1] + across, *size))
    return [Resize(target), *([pad] if down or across else []), crop]


def cover(height: int, width: int, target: Sequence[int]) -> tuple[int, int]:
    """The smallest size of the same aspect that covers `target` (H, W); sides are cut to whole pixels as timm cuts."""
    if target[0] * width <= target[1] * height:  # the width decides
        return max(target[0], target[1] * height // width), target[1]
    return target[0], max(target[1], target[0] * width // height)


def fit(height: int, width: int, target: Sequence[int]) -> tuple[int, int]:
    """The largest size of the same aspect that fits into `target` (H, W), rounded as timm rounds it."""
    ratio = max(height / target[0], width / target[1])
    return max(1, round(height / ratio)), max(1, round(width / ratio))


def centre(height: int, width: int, box_height: int, box_width: int) -> Box:
    """A box in the middle, as torchvision rounds it."""
    return Box(round((height - box_height) / 2), round((width - box_width) / 2), box_height, box_width)
