"""FCN: convolutions on one feature map, then a classifier of its pixels.

Paper: Long et al. 2015, "Fully Convolutional Networks for Semantic Segmentation"; the layers are mmsegmentation's.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from linvit.errors import UserError, check_number
from linvit.heads.layers import ConvNormReLU, pixel_classifier
from linvit.heads.segmentation.base import SegmentationHead


class FCN(SegmentationHead):
    """Convolutions on one feature map; logits of that map's size.

    It reads a single map, the last in `linvit.create_segmentor`, so it fits any backbone, also one without a pyramid
    such as DeiT. At a reduction of 32 small objects are lost; `upernet` and `semantic_fpn` join all maps.

    Args:
        level: Index of the map to read; -1 is the last.
        width: Channels of the convolutions.
        num_convs: Number of 3 x 3 convolutions, each with BatchNorm and ReLU.
        concat_input: Join the map and the result of the convolutions by one more convolution.
        dropout: Fraction of the channels that are dropped before the classifier in training.
    """

    needs_pyramid = False

    def __init__(
        self,
        channels: Sequence[int],
        reductions: Sequence[int],
        num_classes: int,
        *,
        level: int = -1,
        width: int = 512,
        num_convs: int = 2,
        concat_input: bool = True,
        dropout: float = 0.1,
    ) -> None:
        super().__init__(channels, reductions, num_classes)
        if not -len(channels) <= level < len(channels):
            raise UserError(f"level {level} is not one of {len(channels)} feature maps; -1 is the last, 0 the finest")
        check_number("num_convs", num_convs, at_least=1, whole=True)
        self.level = level
        self.reduction = reductions[level]
        into = channels[level]
        self.convs = nn.Sequential(*(ConvNormReLU(width if i else into, width) for i in range(num_convs)))
        self.conv_cat = ConvNormReLU(into + width, width) if concat_input else None
        self.dropout = nn.Dropout2d(dropout)
        self.classifier = pixel_classifier(width, num_classes)

    @classmethod
    def levels(cls, reductions: Sequence[int]) -> list[int]:
        """Returns the position of the last feature map."""
        return [len(reductions) - 1]

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """Maps features (B, C_i, H_i, W_i) to logits (B, K, H_level, W_level)."""
        x = self.convs(features[self.level])
        if self.conv_cat is not None:
            x = self.conv_cat(torch.cat([features[self.level], x], 1))
        return self.classifier(self.dropout(x))  # type: ignore[no-any-return]
