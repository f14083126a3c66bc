"""A sound head of detection, and heads that each break one clause of the contract."""

import torch
from torch import nn

from linvit.heads.detection.retinanet import RetinaNet


class Sound(RetinaNet):
    """RetinaNet with few channels."""

    def __init__(self, channels, reductions, num_classes):
        super().__init__(channels, reductions, num_classes, width=8, convs=1)


class NotFinite(Sound):
    breaks = "losses"

    def losses(self, features, images, targets):
        return {"loss": sum(super().losses(features, images, targets).values()) / 0}


class NothingToLearn(Sound):
    breaks = "empty targets"

    def losses(self, features, images, targets):
        found = super().losses(features, images, targets)
        boxes = sum(len(target["boxes"]) for target in targets)
        return found if boxes else {"loss_cls": found["loss_cls"]}  # nothing for the regressor


class MeanOverBoxes(Sound):
    breaks = "empty targets"

    def losses(self, features, images, targets):
        found = super().losses(features, images, targets)
        return {**found, "loss_bbox": found["loss_bbox"] / sum(len(target["boxes"]) for target in targets)}


class CountsFromOne(Sound):
    breaks = "detections"

    def detect(self, features, images):
        return [{**found, "labels": found["labels"] + 1} for found in super().detect(features, images)]


class Outside(Sound):
    breaks = "detections"

    def detect(self, features, images):
        return [{**found, "boxes": found["boxes"] - 3} for found in super().detect(features, images)]


class LargeImages(Sound):
    breaks = "any size"

    def forward(self, features, images, targets=None):
        assert min(images[0].size) > 32
        return super().forward(features, images, targets)


class ThreeMaps(Sound):
    breaks = "other pyramids"

    def forward(self, features, images, targets=None):
        assert len(features) == 3
        return super().forward(features, images, targets)


class HiddenClassifier(Sound):
    breaks = "classifiers"

    def classifiers(self):
        return []


class Unused(Sound):
    breaks = "gradients"

    def __init__(self, channels, reductions, num_classes):
        super().__init__(channels, reductions, num_classes)
        self.spare = nn.Conv2d(8, 8, 1)


class Noisy(Sound):
    breaks = "determinism"

    def detect(self, features, images):
        return super().detect([x + torch.randn_like(x) for x in features], images)


class Half(Sound):
    breaks = "autocast bfloat16"

    def losses(self, features, images, targets):
        found = super().losses(features, images, targets)
        return {
            name: value.bfloat16() if features[0].dtype == torch.bfloat16 else value for name, value in found.items()
        }


WRONG = [
    NotFinite,
    NothingToLearn,
    MeanOverBoxes,
    CountsFromOne,
    Outside,
    LargeImages,
    ThreeMaps,
    HiddenClassifier,
    Unused,
    Noisy,
    Half,
]
