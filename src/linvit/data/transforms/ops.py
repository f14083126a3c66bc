"""Operations on one sample: drawn from its seed, then applied to its image, its masks and its boxes alike.

torchvision's `tv_tensors` serve the same end. They are not used, because torchvision's affine maps give other pixels
than PIL's, which the published recipes have.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

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
