"""Image transforms for training and evaluation, from torchvision's v2 set."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms import v2

from linvit.errors import UserError

BICUBIC = v2.InterpolationMode.BICUBIC


@dataclass(frozen=True)
class Augmentation:
    """Random changes to a training image.

    Attributes:
        crop_scale: Area share of the random resized crop, [low, high]; null for no random crop.
        hflip: Probability of a horizontal flip.
        rotate: Largest rotation in degrees, either way.
        translate: Largest shift as a share of the side, either way.
        zoom: Largest change of scale, as a share: 0.1 is 0.9 to 1.1.
    """

    crop_scale: tuple[float, float] | None = (0.08, 1.0)
    hflip: float = 0.5
    rotate: float = 0.0
    translate: float = 0.0
    zoom: float = 0.0

    def __post_init__(self) -> None:
        if self.crop_scale is not None and not 0 < self.crop_scale[0] <= self.crop_scale[1] <= 1:
            raise UserError(f"crop_scale must be [low, high] with 0 < low <= high <= 1; got {list(self.crop_scale)}")
        for name, share in (("hflip", self.hflip), ("translate", self.translate)):
            if not 0 <= share <= 1:
                raise UserError(f"{name} must lie between 0 and 1; got {share}")
        if not 0 <= self.zoom < 1:
            raise UserError(f"zoom must be at least 0 and below 1; got {self.zoom}")
        if self.rotate < 0:
            raise UserError(f"rotate must be 0 degrees or more; got {self.rotate}")


class CoverCrop(nn.Module):
    """Resizes an image, aspect kept, until it covers `size / crop`, and takes the centre of `size`."""

    def __init__(self, size: tuple[int, int], crop: float = 1.0) -> None:
        super().__init__()
        self.size = size
        self.crop = crop

    def forward(self, image: Image.Image) -> Image.Image:
        """Any image to one of exactly `size` (H, W)."""
        scale = max(self.size[0] / image.height, self.size[1] / image.width) / self.crop
        covered = [
            max(side, math.floor(scale * old)) for side, old in zip(self.size, (image.height, image.width), strict=True)
        ]
        resized = v2.functional.resize(image, covered, interpolation=BICUBIC)
        return v2.functional.center_crop(resized, list(self.size))  # type: ignore[no-any-return]


def train_transform(
    size: tuple[int, int], augmentation: Augmentation, mean: Sequence[float], std: Sequence[float]
) -> v2.Compose:
    """PIL image to a normalised float tensor (3, H, W), randomly changed."""
    steps: list[nn.Module] = []
    if augmentation.crop_scale is None:
        steps.append(CoverCrop(size))
    else:
        steps.append(v2.RandomResizedCrop(size, scale=augmentation.crop_scale, interpolation=BICUBIC))
    if augmentation.hflip:
        steps.append(v2.RandomHorizontalFlip(augmentation.hflip))
    if augmentation.rotate or augmentation.translate or augmentation.zoom:
        steps.append(
            v2.RandomAffine(
                augmentation.rotate,
                translate=(augmentation.translate, augmentation.translate),
                scale=(1 - augmentation.zoom, 1 + augmentation.zoom),
                interpolation=v2.InterpolationMode.BILINEAR,
            )
        )
    return v2.Compose([*steps, *_to_tensor(mean, std)])


def eval_transform(size: tuple[int, int], crop: float, mean: Sequence[float], std: Sequence[float]) -> v2.Compose:
    """PIL image to a normalised float tensor (3, H, W): cover, centre crop."""
    return v2.Compose([CoverCrop(size, crop), *_to_tensor(mean, std)])


def denormalise(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Normalised images (..., 3, H, W) back to [0, 1], for looking at."""
    scale = torch.as_tensor(std, device=images.device).view(3, 1, 1)
    shift = torch.as_tensor(mean, device=images.device).view(3, 1, 1)
    return (images * scale + shift).clamp(0, 1)


def _to_tensor(mean: Sequence[float], std: Sequence[float]) -> list[nn.Module]:
    return [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(list(mean), list(std))]
