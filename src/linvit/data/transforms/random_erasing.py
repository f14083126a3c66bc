"""Random erasing (Zhong et al. 2020) as timm does it in mode "pixel"."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from linvit.data.transforms.geometry import Box

AREA = (0.02, 1 / 3)  # fraction of the image, uniform
ASPECT = (0.3, 1 / 0.3)  # height over width, uniform in the logarithm


def erased_box(rng: np.random.Generator, probability: float, size: tuple[int, int]) -> Box | None:
    """Draws the box to be erased from an image of `size` (H, W), or None."""
    if rng.random() >= probability:
        return None
    for _ in range(10):
        area = size[0] * size[1] * rng.uniform(*AREA)
        aspect = math.exp(rng.uniform(math.log(ASPECT[0]), math.log(ASPECT[1])))
        height, width = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if height < size[0] and width < size[1]:
            top, left = rng.integers(size[0] - height + 1), rng.integers(size[1] - width + 1)
            return Box(int(top), int(left), height, width)
    return None


def erase_(images: Tensor, boxes: Sequence[Box | None], seeds: Sequence[int]) -> Tensor:
    """Fills a box of each normalised image (B, 3, H, W), unless it is None, with normal noise, in place.

    The noise follows from the sample's seed and the kind of device: a GPU's generator gives other numbers than a CPU's.
    """
    generator = torch.Generator(images.device)
    for image, box, seed in zip(images, boxes, seeds, strict=True):
        if box is not None:
            top, left, height, width = box
            generator.manual_seed(seed)
            image[:, top : top + height, left : left + width].normal_(generator=generator)
    return images
