"""Operations on one sample: drawn from its seed, then applied to its image, its masks and its boxes alike.

Cropping and flipping are `torchvision.transforms.v2.functional`'s. Affine maps are not, since torchvision's give other
pixels than PIL's, which the published recipes have.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as v2

from linvit.data.transforms.pixel_ops import OPERATIONS
from linvit.ignore_index import IGNORE_INDEX

Fill = tuple[int, ...]
"""A colour in 8 bits: red, green, blue, or a value for each channel; one value is for all channels."""
BLACK: Fill = (0,)
PER_BOX = ("boxes", "labels", "masks", "iscrowd")  # entries with one value per box, which leave a sample with it
Op = Callable[[Tensor], Any]
"""Changes an image (C, H, W) with values from 0 to 255, and torchvision's `Mask` and `BoundingBoxes`, as v2's do."""
CropMode = Literal["center", "squash"]


@dataclass(frozen=True)
class PixelOp:
    """Changes colour or sharpness of an image by an amount: one of `OPERATIONS`."""

    name: str
    amount: float

    def __call__(self, image: Tensor) -> Tensor:
        """Calls the function of `linvit.data.transforms.pixel_ops`."""
        return OPERATIONS[self.name](image[None], self.amount)[0]


def apply(ops: Iterable[Op], sample: dict[str, Any]) -> dict[str, Any]:
    """Applies operations to a sample, one after another, on the CPU, and returns a new one.

    It has an `image` (C, H, W), 8-bit or float32, perhaps a `mask` (H, W), and `boxes` (N, 4) as x1, y1, x2, y2, with
    `labels`, `iscrowd` and `masks` (N, H, W). Boxes without area are left out.
    """
    size = sample["image"].shape[-2:]
    kinds: dict[str, Any] = {
        "mask": tv_tensors.Mask,
        "masks": tv_tensors.Mask,
        "boxes": partial(tv_tensors.BoundingBoxes, format="XYXY", canvas_size=size),
    }
    moved = {"image": sample["image"]} | {name: kind(sample[name]) for name, kind in kinds.items() if name in sample}
    for op in ops:
        moved = {name: op(value) for name, value in moved.items()}
    sample = sample | {name: value.as_subclass(Tensor) for name, value in moved.items()}
    if "boxes" in sample:
        kept = (sample["boxes"][:, 2:] > sample["boxes"][:, :2]).all(1)
        sample |= {name: sample[name][kept] for name in PER_BOX if name in sample}
    return sample


Matrix = tuple[float, float, float, float, float, float]
"""(a, b, c, d, e, f): the output at (x, y) is the input at (a x + b y + c, d x + e y + f); PIL's convention."""


def affine_matrix(angle: float, zoom: float, shift: tuple[float, float], size: tuple[int, int]) -> Matrix:
    """Returns the matrix that rotates an image (H, W) anticlockwise about its centre, scales and shifts it."""
    x, y = size[1] / 2, size[0] / 2
    a, b = math.cos(math.radians(angle)) / zoom, -math.sin(math.radians(angle)) / zoom
    from_x, from_y = x + shift[0], y + shift[1]
    return a, b, x - a * from_x - b * from_y, -b, a, y + b * from_x - a * from_y


@dataclass(frozen=True)
class Warp:
    """Warps an image (C, H, W) as PIL does, bicubically or bilinearly; pixels from outside get the colour `fill`."""

    matrix: Matrix
    bicubic: bool
    fill: Fill

    def __call__(self, image: Tensor) -> Tensor:
        """Truncates the results of an 8-bit image; the size stays."""
        mode = Image.Resampling.BICUBIC if self.bicubic else Image.Resampling.BILINEAR
        size = image.shape[2], image.shape[1]
        fill = self.fill if len(self.fill) > 1 else self.fill * len(image)

        def moved(pixels: np.ndarray, colour: Any) -> np.ndarray:
            picture = Image.fromarray(pixels)
            return np.array(picture.transform(size, Image.Transform.AFFINE, self.matrix, mode, fillcolor=colour))

        if image.dtype == torch.uint8 and len(image) == 3:  # all channels at once take less time
            return torch.from_numpy(moved(image.permute(1, 2, 0).numpy(), fill)).permute(2, 0, 1)
        planes = [moved(plane, colour) for plane, colour in zip(image.numpy(), fill, strict=True)]
        return torch.from_numpy(np.stack(planes))


class Box(NamedTuple):
    """A rectangle of pixels."""

    top: int
    left: int
    height: int
    width: int


def crop(inpt: Tensor, box: Box) -> Any:
    """Keeps the part of an image, mask or boxes within a box; no pixels are copied."""
    return v2.crop(inpt, *box)


def pad(inpt: Tensor, right: int, bottom: int) -> Any:
    """Adds black pixels to an image, and ones of no class to a mask."""
    fill = IGNORE_INDEX if isinstance(inpt, tv_tensors.Mask) else 0
    return v2.pad(inpt, [0, 0, right, bottom], fill=fill)


def resize(inpt: Tensor, size: Sequence[int], interpolation: str = "bicubic", antialias: bool = True) -> Any:
    """Resizes an image, mask or boxes to `size` (H, W).

    Of a mask it takes the label at floor(place x old side / new side), which floats, as torch has them, miss at times.
    Boxes are clipped to the image. An image is resized rows first. With antialias, as for recipes of classification, 8
    bits equal PIL's two passes to two levels. Pillow 13 begins with the columns where that is less work, as where the
    height shrinks and the width grows. There bicubic differs, since each pass clips what overshoots: by up to 5 levels
    on photographs, by 30 on noise. Without antialias it is OpenCV's.
    """
    if isinstance(inpt, tv_tensors.BoundingBoxes):
        return v2.clamp_bounding_boxes(v2.resize(inpt, [*size]))
    if isinstance(inpt, tv_tensors.Mask):
        rows, columns = (np.arange(new) * old // new for new, old in zip(size, inpt.shape[-2:], strict=True))
        # numpy, and one axis after the other, is five times as fast as torch on both
        return tv_tensors.Mask(torch.from_numpy(inpt.numpy()[..., rows, :][..., columns]))
    if tuple(inpt.shape[1:]) == tuple(size):
        return inpt
    return F.interpolate(inpt[None], [*size], mode=interpolation, antialias=antialias)[0]


def random_box(
    rng: np.random.Generator, height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float]
) -> Box:
    """Draws the box of a random resized crop (Szegedy et al. 2015), as torchvision and timm do.

    `scale` is the range of the area as a fraction of the image's, uniform; `ratio` that of width over height, uniform
    in the logarithm.
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
