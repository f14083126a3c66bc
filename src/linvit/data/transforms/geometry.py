"""Operations on one sample: drawn from its seed, then applied to its image, its masks and its boxes alike.

torchvision's `tv_tensors` serve the same end. They are not used, because torchvision's affine maps give other pixels
than PIL's, which the published recipes have.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from linvit.data.transforms.pixel_ops import OPERATIONS
from linvit.ignore_index import IGNORE_INDEX

Fill = tuple[int, ...]
"""A colour in 8 bits: red, green, blue, or a value for each channel; one value is for all channels."""
BLACK: Fill = (0,)
PER_BOX = ("boxes", "labels", "masks", "iscrowd")  # entries with one value per box, which leave a sample with it


class Op:
    """One operation. A subclass overrides what it changes."""

    def image(self, image: Tensor) -> Tensor:
        """Changes an image (C, H, W) with values from 0 to 255, 8-bit or float32."""
        return image

    def mask(self, mask: Tensor, fill: int) -> Tensor:
        """Changes labels of pixels (..., H, W), of any integer type, without interpolation; new pixels get `fill`."""
        return mask

    def boxes(self, boxes: Tensor, size: tuple[int, int]) -> Tensor:
        """Changes boxes (N, 4), x1, y1, x2, y2 in pixels from the upper left corner of an image of `size` (H, W).

        The results lie within the new image; those that have left it have no width or no height.
        """
        return boxes


@dataclass(frozen=True)
class PixelOp(Op):
    """Changes colour or sharpness by an amount: one of `OPERATIONS`."""

    name: str
    amount: float

    def image(self, image: Tensor) -> Tensor:
        """Calls the function of `linvit.data.transforms.pixel_ops`."""
        return OPERATIONS[self.name](image[None], self.amount)[0]


def apply(ops: Iterable[Op], sample: dict[str, Any], ignore_index: int = IGNORE_INDEX) -> dict[str, Any]:
    """Applies operations to a sample, one after another, on the CPU, and returns a new one.

    It has an `image` (C, H, W), 8-bit or float32, perhaps a `mask` (H, W), where new pixels get `ignore_index`,
    and `boxes` (N, 4) as x1, y1, x2, y2, with `labels`, `iscrowd` and `masks` (N, H, W). Boxes without area go.
    """
    sample = dict(sample)
    for op in ops:
        height, width = sample["image"].shape[-2:]
        for name, fill in (("mask", ignore_index), ("masks", 0)):
            if name in sample:
                sample[name] = op.mask(sample[name], fill)
        if "boxes" in sample:
            boxes = op.boxes(sample["boxes"], (height, width))
            sample["boxes"], kept = boxes, (boxes[:, 2:] > boxes[:, :2]).all(1)
            sample |= {} if kept.all() else {name: sample[name][kept] for name in PER_BOX if name in sample}
        sample["image"] = op.image(sample["image"])
    return sample


Matrix = tuple[float, float, float, float, float, float]
"""(a, b, c, d, e, f): the output's (x, y) shows what was at (a x + b y + c, d x + e y + f); PIL's convention."""


def affine_matrix(angle: float, zoom: float, shift: tuple[float, float], size: tuple[int, int]) -> Matrix:
    """The matrix that turns an image (H, W) about its centre, anticlockwise by degrees, enlarges and shifts it."""
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


CropMode = Literal["center", "squash"]


class Box(NamedTuple):
    """A rectangle of pixels."""

    top: int
    left: int
    height: int
    width: int


@dataclass(frozen=True)
class Crop(Op):
    """Keeps the part of a sample within a box; nothing is copied."""

    box: Box

    def image(self, image: Tensor) -> Tensor:
        """Returns the pixels within the box."""
        top, left, height, width = self.box
        return image[..., top : top + height, left : left + width]

    def mask(self, mask: Tensor, fill: int) -> Tensor:
        """Returns the labels within the box."""
        return self.image(mask)

    def boxes(self, boxes: Tensor, size: tuple[int, int]) -> Tensor:
        """Shifts the boxes and clips them to the crop."""
        top, left, height, width = self.box
        return clip(boxes - boxes.new_tensor([left, top, left, top]), (height, width))


@dataclass(frozen=True)
class Pad(Op):
    """Adds black pixels on all sides."""

    left: int = 0
    top: int = 0
    right: int = 0
    bottom: int = 0

    def image(self, image: Tensor) -> Tensor:
        """Adds zeros."""
        return self.mask(image, 0)

    def mask(self, mask: Tensor, fill: int) -> Tensor:
        """Adds pixels with the label `fill`."""
        return F.pad(mask, (self.left, self.right, self.top, self.bottom), value=fill)

    def boxes(self, boxes: Tensor, size: tuple[int, int]) -> Tensor:
        """Shifts the boxes."""
        return boxes + boxes.new_tensor([self.left, self.top, self.left, self.top])


@dataclass(frozen=True)
class Resize(Op):
    """Resizes to `size` (H, W).

    With `antialias` an image that shrinks is smoothed, as by PIL, for recipes of classification; without, as by OpenCV.
    """

    size: tuple[int, int]
    interpolation: str = "bicubic"
    antialias: bool = True

    def image(self, image: Tensor) -> Tensor:
        """Resizes in 8 bits, rows first; see `resize`."""
        return resize(image, self.size, self.interpolation, self.antialias)

    def mask(self, mask: Tensor, fill: int) -> Tensor:
        """Takes for each new pixel the label at floor(place x old side / new side), like torch's `nearest`."""
        height, width = mask.shape[-2:]
        rows = np.arange(self.size[0]) * height // self.size[0]
        columns = np.arange(self.size[1]) * width // self.size[1]
        # numpy, and one axis after the other, is five times as fast as torch on both
        return torch.from_numpy(mask.numpy()[..., rows, :][..., columns])

    def boxes(self, boxes: Tensor, size: tuple[int, int]) -> Tensor:
        """Scales by the ratio of the widths and that of the heights, and clips to the image."""
        x, y = self.size[1] / size[1], self.size[0] / size[0]
        return clip(boxes * boxes.new_tensor([x, y, x, y]), self.size)


@dataclass(frozen=True)
class HorizontalFlip(Op):
    """Mirrors a sample: left becomes right."""

    def image(self, image: Tensor) -> Tensor:
        """Mirrors the rows."""
        return image.flip(-1)

    def mask(self, mask: Tensor, fill: int) -> Tensor:
        """Mirrors the rows."""
        return mask.flip(-1)

    def boxes(self, boxes: Tensor, size: tuple[int, int]) -> Tensor:
        """Replaces x by width - x."""
        x1, y1, x2, y2 = boxes.unbind(-1)
        return torch.stack([size[1] - x2, y1, size[1] - x1, y2], -1)


@dataclass(frozen=True)
class Warp(Op):
    """Applies an affine map, bicubically or bilinearly; the size stays."""

    matrix: Matrix
    bicubic: bool
    fill: Fill

    def image(self, image: Tensor) -> Tensor:
        """Interpolates as PIL does."""
        return warp(image, self.matrix, self.bicubic, self.fill)

    def mask(self, mask: Tensor, fill: int) -> Tensor:
        """Gives each pixel the label of the place that it shows, or `fill` if that is outside."""
        a, b, c, d, e, f = self.matrix
        height, width = mask.shape[-2:]
        x, y = np.arange(width) + 0.5, np.arange(height)[:, None] + 0.5  # centres of pixels
        columns, rows = np.floor(a * x + b * y + c), np.floor(d * x + e * y + f)  # (H, W)
        inside = (columns >= 0) & (columns < width) & (rows >= 0) & (rows < height)
        places = np.where(inside, rows * width + columns, 0).astype(np.int64)
        return mask.flatten(-2)[..., torch.from_numpy(places)].masked_fill(torch.from_numpy(~inside), fill)

    def boxes(self, boxes: Tensor, size: tuple[int, int]) -> Tensor:
        """Returns the boxes around the four moved corners, clipped to the image."""
        a, b, c, d, e, f = self.matrix
        inverse = torch.linalg.inv(torch.tensor([[a, b], [d, e]], dtype=torch.float64))
        x, y = boxes.double()[:, [0, 2, 0, 2]] - c, boxes.double()[:, [1, 1, 3, 3]] - f  # (N, 4 corners)
        corners = torch.stack([x, y], -1) @ inverse.mT  # (N, 4, 2)
        return clip(torch.cat([corners.amin(1), corners.amax(1)], -1).to(boxes.dtype), size)


def clip(boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Clips boxes (N, 4), as x1, y1, x2, y2, to an image of `size` (H, W)."""
    limits = boxes.new_tensor([size[1], size[0], size[1], size[0]])
    return boxes.clamp(min=0).minimum(limits)


def resize(image: Tensor, size: Sequence[int], interpolation: str = "bicubic", antialias: bool = True) -> Tensor:
    """Resizes (C, H, W) to `size` (H, W), rows first; with antialias, 8 bits equal PIL's two passes to two levels.

    Pillow 13 begins with the columns where that is less work, as where the height shrinks and the width grows. There
    bicubic differs, since each pass clips what overshoots: by up to 5 levels on photographs, by 30 on noise.
    """
    if tuple(image.shape[1:]) == tuple(size):
        return image
    return F.interpolate(image[None], list(size), mode=interpolation, antialias=antialias)[0]


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
