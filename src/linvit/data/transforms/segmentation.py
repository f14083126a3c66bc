"""Transforms of an image and its mask in a loader process, for training and evaluation of segmentation."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as v2

from linvit.data.loading.sampler import generator
from linvit.data.transforms.geometry import Box, Op, PixelOp, apply, crop, pad, resize
from linvit.data.transforms.on_device import AugmentOn, DeviceOps
from linvit.errors import UserError, check_number, check_range
from linvit.ignore_index import IGNORE_INDEX
from linvit.registry.signatures import check_choices

CHECKS = 10  # crops that are looked at; the next one is taken as it is
Interpolation = Literal["bilinear", "bicubic"]
Limits = tuple[int, int]
"""Of the longer and of the shorter side of a resized image, in pixels."""


@dataclass(frozen=True)
class SegmentationAugmentation:
    """Random changes to a training image and its mask; the values are those of ADE20K's recipes.

    Attributes:
        ratio: Range of the factor by which the limits of the size, or the image, are multiplied, uniform.
        ratios: Factors to draw from instead; null draws from the range.
        interpolation: Of the resized image: bilinear, as by OpenCV, or bicubic, as by PIL, which smooths what shrinks.
        max_class_ratio: Crops are drawn again, ten times at most, until two classes are in them and none has this
            fraction of the labelled pixels or more; null takes the first.
        hflip: Probability of a horizontal flip.
        photometric: Whether brightness, contrast, saturation and hue change at random.
        augment_on: Where photometric is done: worker, image by image, or device, batch by batch.
    """

    ratio: tuple[float, float] = (0.5, 2.0)
    ratios: list[float] | None = None
    interpolation: Interpolation = "bilinear"
    max_class_ratio: float | None = 0.75
    hflip: float = 0.5
    photometric: bool = True
    augment_on: AugmentOn = "worker"

    def __post_init__(self) -> None:
        check_range("ratio", self.ratio)
        if self.ratios is not None and not (self.ratios and min(self.ratios) > 0):
            raise UserError(f"ratios must be numbers above 0, or null for the range 'ratio'; got {self.ratios}")
        check_choices(SegmentationAugmentation, vars(self))
        if self.max_class_ratio is not None:
            check_number("max_class_ratio", self.max_class_ratio, above=0, at_most=1)
        check_number("hflip", self.hflip, at_least=0, at_most=1)


@dataclass
class TrainTransform:
    """Resizes, crops to `size` (H, W), flips and recolours at random, which follows from the sample's seed alone.

    The limits are of the resized image before the random factor; None resizes by the factor alone. Smaller images
    are padded: the image with 0 after normalising, the mask with 255.
    """

    size: tuple[int, int]
    limits: Limits | None
    augmentation: SegmentationAugmentation

    def __call__(self, sample: dict[str, Any], seed: int) -> dict[str, Any]:
        """Turns `image`, 8-bit (3, h, w), and `mask`, 8-bit (h, w), into (3, H, W) and (H, W)."""
        given, rng = self.augmentation, generator(seed)
        height, width = sample["image"].shape[-2:]
        ratio = rng.uniform(*given.ratio) if given.ratios is None else float(rng.choice(given.ratios))
        target = scaled(height, width, ratio)
        if self.limits is not None:
            target = within(height, width, (int(self.limits[0] * ratio), int(self.limits[1] * ratio)))
        smooth = given.interpolation == "bicubic"
        sample = apply([partial(resize, size=target, interpolation=given.interpolation, antialias=smooth)], sample)
        box = self._box(rng, sample["mask"])
        ops: list[Op] = [partial(crop, box=box)]
        if rng.random() < given.hflip:
            ops.append(v2.horizontal_flip)
        sample, colours = apply(ops, sample), photometric_distortion(rng) if given.photometric else []
        while given.augment_on == "worker" and colours:
            sample["image"] = colours.pop(0)(sample["image"])
        inside = (box.height, box.width)
        if inside != self.size:
            sample = apply([partial(pad, right=self.size[1] - box.width, bottom=self.size[0] - box.height)], sample)
        sample |= {name: sample[name].contiguous() for name in ("image", "mask")}
        return sample | {"device_ops": DeviceOps(seed, tuple(colours), None, inside=inside)}

    def _box(self, rng: np.random.Generator, mask: Tensor) -> Box:
        """Draws the crop."""
        height, width = (min(side, full) for side, full in zip(self.size, mask.shape, strict=True))
        limit = self.augmentation.max_class_ratio
        box = None
        for _ in range(CHECKS + 1):
            top, left = (int(rng.integers(full - side + 1)) for full, side in zip(mask.shape, (height, width)))  # noqa: B905
            box = Box(top, left, height, width)
            if limit is None or is_varied(crop(mask, box), limit):
                break
        assert box is not None
        return box


@dataclass
class EvalTransform:
    """Resizes the image within limits, if any, then to multiples; scores are those of the original mask."""

    limits: Limits | None
    multiple: int = 1

    @property
    def options(self) -> dict[str, Any]:
        """The transform's options, as plain values."""
        return {"resize_limits": self.limits and list(self.limits), "multiple": self.multiple}

    def __call__(self, sample: dict[str, Any], seed: int) -> dict[str, Any]:
        """Resizes `image` (3, h, w) and adds `size`, which is (h, w) as it was; the seed does not matter."""
        image, size = sample["image"], tuple(sample["image"].shape[-2:])
        for target in self.sizes(*size):
            image = resize(image, target, "bilinear", antialias=False)
        return sample | {"image": image.contiguous(), "size": size}

    def sizes(self, height: int, width: int) -> list[tuple[int, int]]:
        """Returns the sizes (H, W) that an image gets one after another."""
        kept = (height, width) if self.limits is None else within(height, width, self.limits)
        return [kept, (-(-kept[0] // self.multiple) * self.multiple, -(-kept[1] // self.multiple) * self.multiple)]


def check_resize_limits(limits: Limits | None) -> None:
    """Raises a `UserError` unless limits are a longer and a shorter side."""
    if limits is not None and not limits[0] >= limits[1] > 0:
        raise UserError(f"resize_limits must be [longer side, shorter side] in pixels, above 0; got {list(limits)}")


def within(height: int, width: int, limits: Limits) -> tuple[int, int]:
    """Returns the largest size (H, W) of the same aspect whose sides keep to the limits, rounded as mmcv rounds."""
    return scaled(height, width, min(limits[0] / max(height, width), limits[1] / min(height, width)))


def scaled(height: int, width: int, factor: float) -> tuple[int, int]:
    """Returns a size (H, W) times a factor."""
    return max(1, int(height * factor + 0.5)), max(1, int(width * factor + 0.5))


def is_varied(mask: Tensor, limit: float) -> bool:
    """True if a mask has at least two classes, and none with `limit` of the labelled pixels or more."""
    counts = torch.bincount(mask.flatten(), minlength=IGNORE_INDEX + 1)[:IGNORE_INDEX]
    return bool((counts > 0).sum() > 1) and bool(counts.max() / counts.sum() < limit)


BRIGHTNESS = 32  # brightness changes by at most so many of the 256 levels
FACTORS = (0.5, 1.5)  # of contrast and saturation
HUES = 18  # the hue turns by less than so many of the 180 steps of 8-bit HSV


def photometric_distortion(rng: np.random.Generator) -> list[PixelOp]:
    """Draws changes of brightness, contrast, saturation and hue, each with probability 0.5."""
    ops: list[PixelOp] = []
    if rng.random() < 0.5:
        ops.append(PixelOp("shift", rng.uniform(-BRIGHTNESS, BRIGHTNESS)))
    contrast_first = rng.random() < 0.5
    contrast = [PixelOp("brightness", rng.uniform(*FACTORS))] if rng.random() < 0.5 else []  # a factor: about black
    if contrast_first:
        ops += contrast
    if rng.random() < 0.5:
        ops.append(PixelOp("saturation", rng.uniform(*FACTORS)))
    if rng.random() < 0.5:
        ops.append(PixelOp("hue", 2.0 * rng.integers(-HUES, HUES)))  # degrees
    return ops if contrast_first else ops + contrast
