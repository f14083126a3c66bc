"""Transforms of one image in a loader process, for training and evaluation of a classifier."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch import Tensor
from torchvision.transforms.v2 import functional as v2

from linvit.data.loading.sampler import generator
from linvit.data.transforms import rand_augment
from linvit.data.transforms.geometry import BLACK, Box, CropMode, Fill, Warp, affine_matrix, crop, random_box, resize
from linvit.data.transforms.on_device import AugmentOn, DeviceOps, ImageOp, erased_box
from linvit.errors import check_number, check_range
from linvit.registry.signatures import check_choices

Interpolation = Literal["bicubic", "bilinear", "random"]


@dataclass(frozen=True)
class Augmentation:
    """Random changes to a training image.

    Attributes:
        crop_scale: Area of the random resized crop as a fraction of the image, [low, high]; null for no random crop.
        crop_ratio: Width over height of the random resized crop, [low, high].
        interpolation: Of resizing, shears and rotations: bicubic, bilinear, or random (one of the two each time).
        hflip: Probability of a horizontal flip.
        auto_augment: RandAugment in timm's notation, such as rand-m9-mstd0.5-inc1; null for none.
        augment_on: Where auto_augment and color_jitter are done: worker, image by image, or device, batch by batch.
        color_jitter: Largest change of brightness, contrast and colour, a fraction. timm drops it beside RandAugment.
        random_erasing: Probability that a random box is filled with noise.
        erase_after_mixing: Erase after mixup and CutMix, as the programs of CSwin and SOFT do, so that the noise in
            mixed images keeps its strength; the other programs erase before.
        rotate: Largest rotation in degrees, either way.
        translate: Largest shift as a fraction of the side, either way.
        zoom: Largest change of scale, as a fraction: 0.1 is 0.9 to 1.1.
    """

    crop_scale: tuple[float, float] | None = (0.08, 1.0)
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    interpolation: Interpolation = "bicubic"
    hflip: float = 0.5
    auto_augment: str | None = None
    augment_on: AugmentOn = "worker"
    color_jitter: float = 0.0
    random_erasing: float = 0.0
    erase_after_mixing: bool = False
    rotate: float = 0.0
    translate: float = 0.0
    zoom: float = 0.0

    def __post_init__(self) -> None:
        if self.crop_scale is not None:
            check_range("crop_scale", self.crop_scale, at_most=1)
        check_range("crop_ratio", self.crop_ratio)
        check_choices(Augmentation, vars(self))
        for name in ("hflip", "random_erasing", "translate"):
            check_number(name, getattr(self, name), at_least=0, at_most=1)
        check_number("zoom", self.zoom, at_least=0, below=1)
        for name in ("rotate", "color_jitter"):
            check_number(name, getattr(self, name), at_least=0)
        if self.auto_augment is not None:
            rand_augment.RandAugment.parse(self.auto_augment)


@dataclass(frozen=True)
class NativeSize:
    """Sizes of images that keep their own: sides rounded to whole patches, and shrunk to at most `max_tokens`."""

    patch: int
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        check_number("patch_size", self.patch, at_least=1, at_most=4096, whole=True)
        if self.max_tokens is not None:
            check_number("max_tokens", self.max_tokens, at_least=1, at_most=2**24, whole=True)

    def __call__(self, height: int, width: int) -> tuple[int, int]:
        """Returns the size (H, W) that an image gets; one with exchanged sides gets it exchanged."""
        rows, columns = (max(1, round(side / self.patch)) for side in (height, width))
        if self.max_tokens is not None and rows * columns > self.max_tokens:
            scale = math.sqrt(self.max_tokens / (height * width))
            rows, columns = (max(1, math.floor(side * scale)) for side in (height, width))
            most = self.max_tokens // min(rows, columns)  # for a strip of one row or column
            rows, columns = min(rows, most), min(columns, most)
        return rows * self.patch, columns * self.patch

    def tokens(self, height: int, width: int) -> int:
        """Returns the number of patches of an image."""
        return math.prod(self(height, width)) // self.patch**2


class TrainTransform:
    """Crops an image to `size` (H, W), flips and changes it by its seed alone; RandAugment moves the mean colour in.

    With a `native` size images keep their own, and a crop keeps the aspect up to `crop_ratio`.
    """

    def __init__(
        self, size: tuple[int, int], augmentation: Augmentation, mean: Sequence[float], native: NativeSize | None = None
    ) -> None:
        self.size = size
        self.native = native
        self.augmentation = augmentation
        self.fill: Fill = tuple(min(255, round(255 * value)) for value in mean)  # in 8 bits
        policy = augmentation.auto_augment
        self.rand_augment = None if policy is None else rand_augment.RandAugment.parse(policy)

    def __call__(self, sample: dict[str, Any], seed: int) -> dict[str, Any]:
        """Turns the `image` of a sample, 8-bit (3, h, w), into one of (3, H, W), and adds the `device_ops`."""
        given, rng, image = self.augmentation, generator(seed), sample["image"]
        _, height, width = image.shape
        size, ratio = self.size, given.crop_ratio
        if self.native is not None:
            size, ratio = self.native(height, width), (ratio[0] * width / height, ratio[1] * width / height)
        if given.crop_scale is None:
            image = prepare(image, size, "center", 1.0) if self.native is None else resize(image, size)
        else:
            image = crop(image, random_box(rng, height, width, given.crop_scale, ratio))
            image = resize(image, size, rand_augment.choose(given.interpolation, rng))
        if rng.random() < given.hflip:
            image = v2.horizontal_flip(image)
        now, later = self._warp(rng, size), self._policy(rng, size)
        erase = erased_box(rng, given.random_erasing, size) if given.random_erasing else None
        if given.augment_on == "worker":
            now, later = [*now, *later], []
        for op in now:
            image = op(image)
        ops = DeviceOps(seed, tuple(later), erase, given.erase_after_mixing)
        return sample | {"image": image.contiguous(), "device_ops": ops}

    def _warp(self, rng: np.random.Generator, size: tuple[int, int]) -> list[ImageOp]:
        """Draws rotation, zoom and shift as one map; pixels from outside the image are black."""
        given = self.augmentation
        if not (given.rotate or given.translate or given.zoom):
            return []
        angle, zoom = rng.uniform(-given.rotate, given.rotate), rng.uniform(1 - given.zoom, 1 + given.zoom)
        down, right = (round(side * rng.uniform(-given.translate, given.translate)) for side in size)
        return [Warp(affine_matrix(angle, zoom, (right, down), size), False, BLACK)]

    def _policy(self, rng: np.random.Generator, size: tuple[int, int]) -> list[ImageOp]:
        """Draws what auto_augment and color_jitter do to this image."""
        given, drawn = self.augmentation, []
        if self.rand_augment is not None:
            drawn = self.rand_augment.ops(rng, size, given.interpolation, self.fill)
        return drawn + (rand_augment.color_jitter(rng, given.color_jitter) if given.color_jitter else [])


@dataclass
class EvalTransform:
    """Resizes an image and takes its centre; see `ClassificationData`."""

    size: tuple[int, int]
    crop_mode: CropMode
    crop_pct: float

    @property
    def options(self) -> dict[str, Any]:
        """The transform's options, as plain values."""
        return {"size": list(self.size), "crop_mode": self.crop_mode, "crop_pct": self.crop_pct}

    def __call__(self, sample: dict[str, Any], seed: int) -> dict[str, Any]:
        """Turns the `image` of a sample, 8-bit (3, h, w), into one of (3, H, W); the seed does not matter."""
        image = prepare(sample["image"], self.size, self.crop_mode, self.crop_pct)
        return sample | {"image": image.contiguous()}


@dataclass
class NativeTransform:
    """Brings an image to its native size, without cropping; see `NativeSize`."""

    native: NativeSize

    @property
    def options(self) -> dict[str, Any]:
        """The transform's options, as plain values."""
        return {"patch_size": self.native.patch, "max_tokens": self.native.max_tokens}

    def __call__(self, sample: dict[str, Any], seed: int) -> dict[str, Any]:
        """Resizes the `image` of a sample, 8-bit (3, h, w), bicubically; the seed does not matter."""
        image = sample["image"]
        return sample | {"image": resize(image, self.native(*image.shape[1:])).contiguous()}


def prepare(image: Tensor, size: tuple[int, int], crop_mode: CropMode, crop_pct: float) -> Tensor:
    """Resizes an image bicubically, and crops its centre, as torchvision rounds it."""
    target = math.floor(size[0] / crop_pct), math.floor(size[1] / crop_pct)
    if crop_mode == "center":
        target = cover(image.shape[1], image.shape[2], target)
    top, left = (round((full - side) / 2) for full, side in zip(target, size, strict=True))
    centre: Tensor = crop(resize(image, target), Box(top, left, *size))
    return centre


def cover(height: int, width: int, target: Sequence[int]) -> tuple[int, int]:
    """Returns the smallest size of equal aspect that covers `target` (H, W); sides are truncated as in timm."""
    if target[0] * width <= target[1] * height:  # the width decides
        return max(target[0], target[1] * height // width), target[1]
    return target[0], max(target[1], target[0] * width // height)
