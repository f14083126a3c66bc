"""From decoded images to samples: what training and evaluation do to one image in a loader process."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from linvit.data.loading.seeds import generator
from linvit.data.transforms import geometry, ops, rand_augment
from linvit.data.transforms.geometry import CropMode
from linvit.data.transforms.ops import BLACK, DeviceOps, Fill, Op, Warp
from linvit.data.transforms.random_erasing import erased_box
from linvit.errors import UserError, check_choice


@dataclass(frozen=True)
class Augmentation:
    """Random changes to a training image.

    Attributes:
        crop_scale: Area of the random resized crop as a fraction of the image, [low, high]; null for no random crop.
        crop_ratio: Width over height of the random resized crop, [low, high].
        interpolation: Of resizing, shears and rotations: bicubic, bilinear, or random (one of the two each time).
        hflip: Probability of a horizontal flip.
        auto_augment: RandAugment in timm's notation, such as rand-m9-mstd0.5-inc1, or 3-augment; null for neither.
        augment_on: Where auto_augment and color_jitter are done: worker, image by image, or device, batch by batch.
        color_jitter: Largest change of brightness, contrast and colour, a fraction. timm drops it beside RandAugment.
        random_erasing: Probability that a random box is filled with noise.
        rotate: Largest rotation in degrees, either way.
        translate: Largest shift as a fraction of the side, either way.
        zoom: Largest change of scale, as a fraction: 0.1 is 0.9 to 1.1.
    """

    crop_scale: tuple[float, float] | None = (0.08, 1.0)
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    interpolation: Literal["bicubic", "bilinear", "random"] = "bicubic"
    hflip: float = 0.5
    auto_augment: str | None = None
    augment_on: Literal["worker", "device"] = "worker"
    color_jitter: float = 0.0
    random_erasing: float = 0.0
    rotate: float = 0.0
    translate: float = 0.0
    zoom: float = 0.0

    def __post_init__(self) -> None:
        if self.crop_scale is not None and not 0 < self.crop_scale[0] <= self.crop_scale[1] <= 1:
            raise UserError(f"crop_scale must be [low, high] with 0 < low <= high <= 1; got {list(self.crop_scale)}")
        if not 0 < self.crop_ratio[0] <= self.crop_ratio[1]:
            raise UserError(f"crop_ratio must be [low, high] with 0 < low <= high; got {list(self.crop_ratio)}")
        check_choice("interpolation", self.interpolation, ["bicubic", "bilinear", "random"])
        check_choice("augment_on", self.augment_on, ["worker", "device"])
        for name in ("hflip", "random_erasing", "translate"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name} must lie between 0 and 1; got {getattr(self, name)}")
        if not 0 <= self.zoom < 1:
            raise UserError(f"zoom must be at least 0 and below 1; got {self.zoom}")
        for name in ("rotate", "color_jitter"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} must be 0 or more; got {getattr(self, name)}")
        if self.auto_augment not in (None, rand_augment.THREE_AUGMENT):
            rand_augment.RandAugment.parse(str(self.auto_augment))


class TrainTransform:
    """Crops, flips and changes an image at random; the sample's seed is the only source of randomness.

    Args:
        size: Wanted (H, W).
        augmentation: The random changes.
        mean: Mean of each channel in [0, 1], the colour of what RandAugment moves in from outside.
    """

    def __init__(self, size: tuple[int, int], augmentation: Augmentation, mean: Sequence[float]) -> None:
        self.size = size
        self.augmentation = augmentation
        self.fill = colour_of(mean)
        policy = augmentation.auto_augment
        named = policy is not None and policy != rand_augment.THREE_AUGMENT
        self.rand_augment = rand_augment.RandAugment.parse(str(policy)) if named else None

    def __call__(self, image: Tensor, seed: int) -> dict[str, Any]:
        """8-bit pixels (3, h, w) and the sample's seed to `image` (3, H, W), 8-bit, and `device_ops`."""
        given, rng = self.augmentation, generator(seed)
        if given.crop_scale is None:
            image = geometry.evaluation_view(image, self.size, "center", 1.0)
        else:
            box = geometry.random_box(rng, image.shape[1], image.shape[2], given.crop_scale, given.crop_ratio)
            image = geometry.resize(geometry.cut(image, box), self.size, rand_augment.choose(given.interpolation, rng))
        if rng.random() < given.hflip:
            image = image.flip(-1)
        image = ops.apply(self._moves(rng), image)
        drawn = self._policy(rng)
        erase = erased_box(rng, given.random_erasing, self.size) if given.random_erasing else None
        if given.augment_on == "worker":
            image, drawn = ops.apply(drawn, image), []
        return {"image": image.contiguous(), "device_ops": DeviceOps(seed, tuple(drawn), erase)}

    def _moves(self, rng: np.random.Generator) -> list[Op | Warp]:
        """Rotation, zoom and shift in one; what comes in from outside is black."""
        given = self.augmentation
        if not (given.rotate or given.translate or given.zoom):
            return []
        angle, zoom = rng.uniform(-given.rotate, given.rotate), rng.uniform(1 - given.zoom, 1 + given.zoom)
        down, right = (round(side * rng.uniform(-given.translate, given.translate)) for side in self.size)
        return [Warp(ops.affine(angle, zoom, (right, down), self.size), False, BLACK)]

    def _policy(self, rng: np.random.Generator) -> list[Op | Warp]:
        """What auto_augment and color_jitter do to this image."""
        given, drawn = self.augmentation, []
        if self.rand_augment is not None:
            drawn = self.rand_augment.ops(rng, self.size, given.interpolation, self.fill)
        elif given.auto_augment is not None:
            drawn = rand_augment.three_augment(rng)
        return drawn + (rand_augment.color_jitter(rng, given.color_jitter) if given.color_jitter else [])


def colour_of(mean: Sequence[float]) -> Fill:
    """The mean colour in 8 bits, from means in [0, 1]."""
    red, green, blue = (min(255, round(255 * value)) for value in mean)
    return red, green, blue


class EvalTransform:
    """Resizes an image and takes its centre; see `linvit.data.transforms.geometry.evaluation_view`."""

    def __init__(self, size: tuple[int, int], crop_mode: CropMode, crop_pct: float, mean: Sequence[float]) -> None:
        self.size = size
        self.crop_mode = crop_mode
        self.crop_pct = crop_pct
        self.fill = colour_of(mean)

    def __call__(self, image: Tensor, seed: int) -> dict[str, Any]:
        """8-bit pixels (3, h, w) to `image` (3, H, W), 8-bit; the seed does not matter."""
        return {
            "image": geometry.evaluation_view(image, self.size, self.crop_mode, self.crop_pct, self.fill).contiguous()
        }


def denormalise(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Normalised images (..., 3, H, W) back to [0, 1], for looking at."""
    scale = torch.as_tensor(std, device=images.device).view(3, 1, 1)
    shift = torch.as_tensor(mean, device=images.device).view(3, 1, 1)
    return (images * scale + shift).clamp(0, 1)
