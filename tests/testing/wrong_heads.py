"""A sound head of semantic segmentation, and heads that each break one clause of the contract."""

import torch
from torch import nn
from torch.nn import functional as F

from linvit import SegmentationHead


class Sound(SegmentationHead):
    """A classifier on the first map, added to what a convolution makes of the others."""

    def __init__(self, channels, reductions, num_classes):
        super().__init__(channels, reductions, num_classes)
        self.check_pyramid()
        self.convs = nn.ModuleList(nn.Conv2d(into, 8, 1) for into in channels)
        self.classifier = nn.Conv2d(8, num_classes, 1)

    def forward(self, features):
        maps = [conv(x) for conv, x in zip(self.convs, features, strict=True)]
        return self.classifier(sum(F.interpolate(x, maps[0].shape[-2:], mode="bilinear") for x in maps))


class Transposed(Sound):
    breaks = "shapes"

    def forward(self, features):
        return super().forward(features).mT


class EvenSides(Sound):
    breaks = "shapes"

    def forward(self, features):
        maps = [conv(x) for conv, x in zip(self.convs, features, strict=True)]
        return self.classifier(sum(F.interpolate(x, scale_factor=2**i) for i, x in enumerate(maps)))


class FourMaps(Sound):
    breaks = "other pyramids"

    def forward(self, features):
        assert len(features) == 4
        return super().forward(features)


class TwoLogits(Sound):
    breaks = "auxiliary outputs"

    def with_auxiliary(self, features):
        return self(features), [features[0]]


class HiddenClassifier(Sound):
    breaks = "classifiers"

    def __init__(self, channels, reductions, num_classes):
        super().__init__(channels, reductions, num_classes)
        self.prior = nn.Parameter(torch.zeros(num_classes, 1, 1))

    def forward(self, features):
        return super().forward(features) + self.prior


class Unused(Sound):
    breaks = "gradients"

    def __init__(self, channels, reductions, num_classes):
        super().__init__(channels, reductions, num_classes)
        self.spare = nn.Conv2d(8, 8, 1)


class AlwaysDropout(Sound):
    breaks = "determinism"

    def forward(self, features):
        return super().forward([F.dropout2d(features[0], training=True), *features[1:]])


class MixedBatch(Sound):
    breaks = "batch independence"

    def forward(self, features):
        out = super().forward(features)
        return out - out.mean(0)


WRONG = [Transposed, EvenSides, FourMaps, TwoLogits, HiddenClassifier, Unused, AlwaysDropout, MixedBatch]
