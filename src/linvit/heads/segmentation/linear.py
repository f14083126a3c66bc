"""Linear heads: classify each pixel from the features of a frozen backbone.

Paper: Oquab et al. 2024, "DINOv2: Learning Robust Visual Features without Supervision", Sec. 7.4; the layers are those
of its `BNHead`. DINOv3's (Siméoni et al. 2025) has a dropout before them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from linvit.heads.layers import pixel_classifier, resize
from linvit.heads.segmentation.base import SegmentationHead


class Linear(SegmentationHead):
    """BatchNorm and a 1 x 1 convolution on the last feature map; logits of that map's size.

    Args:
        dropout: Fraction of the channels that are dropped first in training.
    """

    needs_pyramid = False

    def __init__(
        self, channels: Sequence[int], reductions: Sequence[int], num_classes: int, *, dropout: float = 0.0
    ) -> None:
        super().__init__(channels, reductions, num_classes)
        self.reduction = reductions[0]
        self.dropout = nn.Dropout2d(dropout)
        self.bn = nn.BatchNorm2d(sum(channels))
        self.classifier = pixel_classifier(sum(channels), num_classes)

    @classmethod
    def levels(cls, reductions: Sequence[int]) -> list[int]:
        """Returns the position of the last feature map."""
        return [len(reductions) - 1]

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """Maps features (B, C_i, H_i, W_i), resized to the first and joined, to logits (B, K, H_0, W_0)."""
        x = torch.cat([resize(x, features[0].shape[-2:]) for x in features], 1)
        return self.classifier(self.bn(self.dropout(x)))  # type: ignore[no-any-return]


class MultiScaleLinear(Linear):
    """`linear` on the last four feature maps, joined: DINOv2's "+ms", evaluated at several scales of images."""

    @classmethod
    def levels(cls, reductions: Sequence[int]) -> list[int]:
        """Returns the positions of the last four feature maps."""
        return list(range(len(reductions)))[-4:]
