"""Semantic FPN: a feature pyramid whose maps are upsampled to the finest size and added.

Paper: Kirillov et al. 2019, "Panoptic Feature Pyramid Networks"; the layers are those of mmsegmentation, with which the
PVT papers train (Wang et al. 2021).
"""

import math
from collections.abc import Sequence

from torch import Tensor, nn

from linvit.heads.layers import FPN, ConvNormReLU, pixel_classifier, resize
from linvit.heads.segmentation.base import SegmentationHead


class SemanticFPN(SegmentationHead):
    """A feature pyramid network, then on each map a convolution per halving of its size, each followed by upsampling.

    Args:
        reductions: Image side over map side of each map; 4 first.
        width: Channels of the convolutions on the maps of the pyramid.
        fpn_width: Channels of the maps of the pyramid.
        fpn: Join the maps by a feature pyramid network; false if they already have `fpn_width` channels.
        dropout: Fraction of the channels that are dropped before the classifier in training.
    """

    fpn_width = "fpn_width"

    def __init__(
        self,
        channels: Sequence[int],
        reductions: Sequence[int],
        num_classes: int,
        *,
        width: int = 128,
        fpn_width: int = 256,
        fpn: bool = True,
        dropout: float = 0.1,
    ) -> None:
        super().__init__(channels, reductions, num_classes)
        self.check_pyramid(levels=1)
        self.reduction = reductions[0]
        self.fpn = FPN(channels, fpn_width, join=fpn)
        halvings = [int(math.log2(reduction / reductions[0])) for reduction in reductions]
        self.scale_heads = nn.ModuleList(scale_head(fpn_width, width, count) for count in halvings)
        self.dropout = nn.Dropout2d(dropout)
        self.classifier = pixel_classifier(width, num_classes)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """Maps features (B, C_i, H_i, W_i), the finest first, to logits (B, K, H_0, W_0)."""
        return self.fuse(self.fpn(features))

    def fuse(self, maps: Sequence[Tensor]) -> Tensor:
        """Fuses the maps of the pyramid (B, fpn_width, H_i, W_i) into logits (B, K, H_0, W_0)."""
        x = self.scale_heads[0](maps[0])
        for head, other in zip(self.scale_heads[1:], maps[1:], strict=True):
            x = x + resize(head(other), x.shape[-2:])
        return self.classifier(self.dropout(x))  # type: ignore[no-any-return]


def scale_head(into: int, width: int, halvings: int) -> nn.Sequential:
    """Builds one convolution for each halving of the map's size, followed by upsampling; at least one convolution."""
    layers: list[nn.Module] = [ConvNormReLU(into, width)]
    for i in range(halvings):
        if i:
            layers.append(ConvNormReLU(width, width))
        layers.append(nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False))
    return nn.Sequential(*layers)
