"""Operations on a whole batch on the device: deferred augmentation, normalising, random erasing."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from linvit.data.transforms.geometry import Box, Matrix, PixelOp, Warp
from linvit.data.transforms.pixel_ops import OPERATIONS

ImageOp = PixelOp | Warp
"""Operations on the device: those of RandAugment and colour jitter."""
AugmentOn = Literal["worker", "device"]
"""Place of the operations: image by image in a loader process, or batch by batch on the device."""
EPSILON = 2**-10  # added before truncating: the weights of an interpolation sum to 1 only up to rounding


@dataclass(frozen=True)
class DeviceOps:
    """Operations on one sample that run on the device, and a box to erase, with noise from the seed.

    Below and to the right of `inside` (h, w) a padded image becomes 0 after normalising.
    """

    seed: int
    ops: tuple[ImageOp, ...]
    erase: Box | None
    erase_after_mixing: bool = False
    inside: tuple[int, int] | None = None


class BatchDeviceOps:
    """The device ops of a batch. Not a list: Lightning would search it, item by item, for tensors to move."""

    def __init__(self, samples: Sequence[DeviceOps]) -> None:
        self.samples = samples
        self.erase_after_mixing = any(sample.erase_after_mixing for sample in samples)

    def apply(self, images: Tensor) -> Tensor:
        """Applies the operations to 8-bit images (B, 3, H, W)."""
        ops = [sample.ops for sample in self.samples]
        return apply_ops(images, ops) if any(ops) else images

    def clear_padding(self, images: Tensor) -> Tensor:
        """Sets the padding of normalised images (B, 3, H, W) to 0, the mean colour, in place."""
        for image, sample in zip(images, self.samples, strict=True):
            if sample.inside is not None:
                image[:, sample.inside[0] :] = 0
                image[:, :, sample.inside[1] :] = 0
        return images

    def erase(self, images: Tensor) -> Tensor:
        """Erases a box of each normalised image (B, 3, H, W) for which one was drawn, in place."""
        generator = torch.Generator(images.device)  # a GPU's gives other numbers than a CPU's
        for image, sample in zip(images, self.samples, strict=True):
            if sample.erase is not None:
                top, left, height, width = sample.erase
                generator.manual_seed(sample.seed)
                image[:, top : top + height, left : left + width].normal_(generator=generator)
        return images


class Normalisation:
    """Brings images of a batch to mean 0 and deviation 1 over the data, by those of each channel in [0, 1]."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self._statistics = torch.tensor([mean, std]).view(2, -1, 1, 1)

    def __call__(self, images: Tensor) -> Tensor:
        """Converts images (..., C, H, W), from 0 to 255, to float32."""
        if self._statistics.device != images.device:
            self._statistics = self._statistics.to(images.device)
        mean, std = 255 * self._statistics
        return images.to(torch.float32, copy=True).sub_(mean).div_(std)

    def undo(self, images: Tensor) -> Tensor:
        """Converts normalised images (..., C, H, W) to [0, 1]."""
        mean, std = self._statistics.to(images.device)
        shown: Tensor = (images * std + mean).clamp(0, 1)
        return shown

    def finish(self, batch: dict[str, Any]) -> None:
        """Runs the remaining operations on the images of a batch, in place: augmentation, normalising, erasing.

        A recipe may erase after mixup and CutMix. These are the task's, since they change the targets too: it finds
        `after_mixing` in the batch, and calls it with the images (B, C, H, W) that it has mixed, which returns them.
        """
        image, ops = batch["image"], batch.pop("device_ops", None)
        if isinstance(image, list):  # of several sizes
            alone = [None] * len(image) if ops is None else [BatchDeviceOps([op]) for op in ops.samples]
            batch["image"] = [self.finished(one[None], op)[0] for one, op in zip(image, alone, strict=True)]
        elif ops is None:
            batch["image"] = self(image)
        else:
            image = ops.clear_padding(self(ops.apply(image)))
            if ops.erase_after_mixing:
                batch["after_mixing"] = ops.erase
            batch["image"] = image if ops.erase_after_mixing else ops.erase(image)

    def finished(self, images: Tensor, ops: BatchDeviceOps | None) -> Tensor:
        """Runs all operations on images (B, C, H, W) that are not mixed."""
        return self(images) if ops is None else ops.erase(ops.clear_padding(self(ops.apply(images))))


def apply_ops(images: Tensor, ops: Sequence[Sequence[ImageOp]]) -> Tensor:
    """Applies to every 8-bit image (B, 3, H, W) its own operations; those of one kind are done together."""
    images = images.clone()
    for layer in range(max(map(len, ops))):
        alike: dict[Any, list[tuple[int, Any]]] = defaultdict(list)
        for i, own in enumerate(ops):
            if layer < len(own):
                op = own[layer]
                if isinstance(op, PixelOp):
                    alike[op.name].append((i, op.amount))
                else:
                    alike[op.bicubic, op.fill].append((i, op.matrix))
        for kind, members in alike.items():
            rows = _sent([i for i, _ in members], images)
            amounts = [amount for _, amount in members]
            if isinstance(kind, str):
                changed = OPERATIONS[kind](images[rows], _sent(amounts, images).view(-1, 1, 1, 1))
            else:
                changed = warp_batch(images[rows], amounts, *kind)
            images[rows] = changed
    return images


def _sent(values: Sequence[Any], images: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Copies numbers to the device of images without synchronising."""
    return torch.tensor(values, dtype=dtype).to(images.device, non_blocking=True)


def warp_batch(images: Tensor, matrices: Sequence[Matrix], bicubic: bool, fill: Sequence[int]) -> Tensor:
    """Maps each of the 8-bit images (n, 3, H, W) by its own matrix; see `linvit.data.transforms.geometry.warp`.

    torch interpolates with Keys' kernel at a = -0.75 where PIL has a = -1, so bicubic results differ a little at edges.
    """
    height, width = images.shape[-2:]
    device = images.device
    x, y = torch.arange(width, device=device) + 0.5, torch.arange(height, device=device) + 0.5
    places = torch.stack([x.expand(height, -1), y[:, None].expand(-1, width), x.new_ones(height, width)], -1)
    maps = _sent(matrices, images, torch.float32).view(-1, 1, 2, 3)
    grid = places @ maps.mT  # (H, W, 3) @ (n, 1, 3, 2) -> (n, H, W, 2)
    grid = grid / _sent([width, height], images, torch.float32)  # 0 to 1 within the image
    mode = "bicubic" if bicubic else "bilinear"
    moved = F.grid_sample(images.float(), 2 * grid - 1, mode, padding_mode="border", align_corners=False)
    inside = ((grid >= 0) & (grid < 1)).all(-1)[:, None]  # (n, 1, H, W)
    colour = _sent(fill, images, torch.float32).view(-1, 1, 1)
    return torch.where(inside, moved.add_(EPSILON).clamp_(0, 255), colour).to(torch.uint8)


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
