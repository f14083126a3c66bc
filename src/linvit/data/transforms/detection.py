"""Transforms of an image and its objects in a loader process, for training and evaluation of detection."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torchvision.transforms.v2 import functional as v2

from linvit.data.loading.sampler import generator
from linvit.data.transforms import segmentation
from linvit.data.transforms.geometry import Box, Op, apply, crop, resize
from linvit.data.transforms.segmentation import Limits, within
from linvit.errors import UserError, check_number, check_range
from linvit.io import coco_masks

Objects = Mapping[str, Any]
"""Objects of an image: `boxes` (n, 4) as x1, y1, x2, y2 and `labels` (n,), arrays; where the data have them `iscrowd`
and `ignore`, bool (n,), `area` (n,), and masks: `rles`, a list, or `masks` (n, H, W)."""


EMPTY_MASK = "an empty mask (polygons need three corners or more, in pixels)"
FAR = 10  # largest distance of a corner from its image, in sides of the image


@dataclass(frozen=True)
class DetectionAugmentation:
    """Random changes to a training image and its objects.

    Attributes:
        hflip: Probability of a horizontal flip.
        sides: Multi-scale training: lengths of the shorter side to draw from; null takes that of
            `resize_limits`.
        crop_sides: Half of the images are first resized to a shorter side drawn from these, then cropped, then resized
            by `sides`, as in DETR's recipe; null crops none.
        crop_size: Least and largest height and width of that crop.
    """

    hflip: float = 0.5
    sides: tuple[int, ...] | None = None
    crop_sides: tuple[int, ...] | None = None
    crop_size: tuple[int, int] = (384, 600)

    def __post_init__(self) -> None:
        check_number("hflip", self.hflip, at_least=0, at_most=1)
        for name in ("sides", "crop_sides"):
            sides = getattr(self, name)
            if sides is not None and (not sides or min(sides) < 1):
                raise UserError(f"{name} must be sides in pixels, above 0, or null; got {list(sides)}")
        if self.crop_sides is not None and self.sides is None:
            raise UserError("crop_sides needs sides, the lengths to which crops are resized")
        check_range("crop_size", self.crop_size)


class TrainTransform:
    """Resizes within limits (see `Limits`), crops and flips at random, which follows from the sample's seed alone."""

    def __init__(self, limits: Limits | None, augmentation: DetectionAugmentation, masks: bool) -> None:
        if augmentation.sides is not None and limits is None:
            raise UserError("augmentation.sides needs resize_limits, whose first number is the longest longer side")
        self.limits = limits
        self.augmentation = augmentation
        self.masks = masks

    def __call__(self, sample: dict[str, Any], seed: int) -> dict[str, Any]:
        """Turns `image`, 8-bit (3, H, W), and `objects` into `image` (3, h, w), `boxes`, `labels` and `masks` there.

        Left out are objects that are not `trainable`.
        """
        sample = dict(sample)
        objects, size = sample.pop("objects"), tuple(sample["image"].shape[-2:])
        kept = trainable(objects, size, self.masks)
        sample["boxes"] = torch.from_numpy(objects["boxes"][kept]).float()
        sample["labels"] = torch.from_numpy(objects["labels"][kept])
        if self.masks:
            sample["masks"] = torch.from_numpy(_masks(objects, kept, size))
        sample = apply(self._ops(generator(seed), size), sample)
        sample |= {name: sample[name].contiguous() for name in ("image", "masks") if name in sample}
        return sample | {"size": size}

    def _ops(self, rng: np.random.Generator, size: tuple[int, int]) -> list[Op]:
        """Draws the operations on an image of a size (H, W)."""
        given, limits = self.augmentation, self.limits
        flip: list[Op] = [v2.horizontal_flip] if rng.random() < given.hflip else []
        if limits is None:
            return flip
        if given.sides is None:
            return [_resize(within(*size, limits)), *flip]
        ops = flip  # first, as in DETR's recipe
        if given.crop_sides is not None and rng.random() < 0.5:
            size = within(*size, (limits[0], int(rng.choice(given.crop_sides))))
            least, largest = given.crop_size
            height, width = (int(rng.integers(min(side, least), min(side, largest) + 1)) for side in size)
            top, left = int(rng.integers(size[0] - height + 1)), int(rng.integers(size[1] - width + 1))
            ops = [*ops, _resize(size), partial(crop, box=Box(top, left, height, width))]
            size = (height, width)
        return [*ops, _resize(within(*size, (limits[0], int(rng.choice(given.sides)))))]


class EvalTransform:
    """Resizes the image and leaves its objects as they are: the truth of evaluation is at the original size."""

    def __init__(self, limits: Limits | None, masks: bool) -> None:
        self.resize = segmentation.EvalTransform(limits)
        self.options = self.resize.options
        self.masks = masks

    def __call__(self, sample: dict[str, Any], seed: int) -> dict[str, Any]:
        """Adds `size`, and of the objects `boxes` (float64), `labels`, `iscrowd`, `area` and with masks `rles`."""
        sample = self.resize(sample, seed)
        objects = sample.pop("objects", None)
        if objects is None:  # to be predicted
            return sample
        crowds = objects.get("iscrowd", np.zeros(len(objects["labels"]), bool))
        found = {"labels": objects["labels"], "iscrowd": crowds}
        found |= {"boxes": objects["boxes"].astype(np.float64), "area": np.asarray(areas(objects), np.float64)}
        sample |= {name: torch.from_numpy(values) for name, values in found.items()}
        if self.masks:
            sample["rles"] = objects["rles"] if "rles" in objects else coco_masks.encode(objects["masks"])
        return sample


def areas(objects: Objects) -> np.ndarray:
    """Areas (n,) of objects: as the data say, or those of the masks, or those of the boxes."""
    if "masks" in objects:
        return mask_areas(objects)
    boxes = objects["boxes"]
    of_boxes: np.ndarray = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    return np.where(np.isnan(objects["area"]), of_boxes, objects["area"]) if "area" in objects else of_boxes


def trainable(objects: Objects, size: tuple[Any, Any], masks: bool = False) -> np.ndarray:
    """Returns which objects are trained on, bool (n,): all but those with a reason in `left_out`."""
    kept: np.ndarray = ~np.any([*left_out(objects, size, masks).values()], 0)
    return kept


def left_out(objects: Objects, size: tuple[Any, Any], masks: bool = False) -> dict[str, np.ndarray]:
    """Returns which objects training leaves out, bool (n,), by reason; an object may have several reasons.

    mmdetection leaves out the same objects (`CocoDataset._parse_ann_info`), but for empty masks.

    Args:
        objects: Boxes and what else is known of n objects.
        size: (H, W) of one image, or two arrays (n,), of the image of each object.
        masks: True if masks are trained: empty ones are left out.
    """
    boxes = objects["boxes"]
    x1, y1, x2, y2 = boxes.T
    seen = (np.minimum(x2, size[1]) > np.maximum(x1, 0)) & (np.minimum(y2, size[0]) > np.maximum(y1, 0))
    sides = (boxes[:, 2:] - boxes[:, :2]).min(1, initial=np.inf)
    nothing = np.zeros(len(boxes), bool)
    found: dict[str, np.ndarray] = {
        "a box of negative width or height": sides < 0,
        "a box with a side of less than a pixel": (sides >= 0) & (sides < 1),
        "a box outside of its image": (sides >= 1) & ~seen,
        "an area of 0 or less": areas(objects) <= 0,
        "iscrowd: 1": objects.get("iscrowd", nothing),
        "ignore: 1": objects.get("ignore", nothing),
    }
    return found | ({EMPTY_MASK: mask_areas(objects) <= 0} if masks else {})


def usable(objects: Objects, size: tuple[Any, Any]) -> np.ndarray:
    """Returns which objects have a box of finite numbers not far outside of their image, bool (n,); see `left_out`."""
    near: np.ndarray = np.abs(objects["boxes"]).max(1, initial=0) <= FAR * np.maximum(*size)
    near &= np.isfinite(objects["boxes"]).all(1) & np.isfinite(areas(objects))
    return near


def mask_areas(objects: Objects) -> np.ndarray:
    """Returns the number of pixels of each mask (n,)."""
    if "masks" in objects:
        return objects["masks"].sum((1, 2))  # type: ignore[no-any-return]
    return coco_masks.area(objects["rles"])


def _masks(objects: Objects, kept: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """Returns masks (n, H, W) of some objects."""
    if "masks" in objects:
        return objects["masks"][kept]  # type: ignore[no-any-return]
    chosen = [objects["rles"][index] for index in np.flatnonzero(kept)]
    return coco_masks.decode(chosen) if chosen else np.zeros((0, *size), np.uint8)


def _resize(size: tuple[int, int]) -> Op:
    return partial(resize, size=size, interpolation="bilinear", antialias=False)
