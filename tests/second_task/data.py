"""Digits whose pixels are labelled: 1 is ink, 0 is paper."""

from typing import Any

import torch

from linvit.data.base import ImageData
from linvit.data.transforms.classification import Augmentation, EvalTransform, TrainTransform


class WithMask:
    """A transform, and a mask that is made from its image."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    @property
    def options(self) -> dict[str, Any]:
        return self.transform.options  # which images are prepared with that have no mask, too

    def __call__(self, sample: dict[str, Any], seed: int) -> dict[str, Any]:
        sample = self.transform(sample, seed)
        return {**sample, "mask": (sample["image"].float().mean(0) > 96).to(torch.uint8)}  # (H, W)


class InkData(ImageData):
    """Images and masks.

    Args:
        rotate: Largest rotation of a training sample in degrees.
        **data: Arguments of `ImageData`.
    """

    num_classes = 2
    class_names = ("paper", "ink")

    def __init__(self, rotate: float = 10, **data: Any) -> None:
        super().__init__(**data)
        augmentation = Augmentation(crop_scale=None, rotate=rotate)
        self.train_transform = WithMask(TrainTransform(self.size, augmentation, self.mean))
        self.eval_transform = WithMask(EvalTransform(self.size, "center", 1.0))

    def targets(self, split: str) -> dict[str, Any]:
        """None is in the table: masks are made from the images."""
        return {}
