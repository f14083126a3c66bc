"""UPerNet: pyramid pooling on the coarsest map, a feature pyramid over all of them, and their fusion at the finest.

Paper: Xiao et al. 2018, "Unified Perceptual Parsing for Scene Understanding"; the layers are those of mmsegmentation,
with which the Swin and CSWin papers train (Liu et al. 2021; Dong et al. 2022).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from linvit.heads.layers import ConvNormReLU, PyramidPooling, pixel_classifier, resize
from linvit.heads.segmentation.base import SegmentationHead
from linvit.heads.segmentation.fcn import FCN


class UPerNet(SegmentationHead):
    """UPerNet with an auxiliary FCN on the last map but one, used only in training.

    Args:
        reductions: Image side over map side of each map; 4 first.
        width: Channels of all convolutions.
        pool_sizes: Sides of the grids of the pyramid pooling.
        dropout: Fraction of the channels that are dropped before the classifier in training.
        auxiliary_width: Channels of the auxiliary FCN; 0 leaves it out.
    """

    plain_maps = 4

    def __init__(
        self,
        channels: Sequence[int],
        reductions: Sequence[int],
        num_classes: int,
        *,
        width: int = 512,
        pool_sizes: Sequence[int] = (1, 2, 3, 6),
        dropout: float = 0.1,
        auxiliary_width: int = 256,
    ) -> None:
        super().__init__(channels, reductions, num_classes)
        self.check_pyramid()
        self.reduction = reductions[0]
        self.pyramid_pooling = PyramidPooling(channels[-1], width, pool_sizes)
        self.lateral_convs = nn.ModuleList(ConvNormReLU(into, width, 1) for into in channels[:-1])
        self.fpn_convs = nn.ModuleList(ConvNormReLU(width, width) for _ in channels[:-1])
        self.fpn_bottleneck = ConvNormReLU(len(channels) * width, width)
        self.dropout = nn.Dropout2d(dropout)
        self.classifier = pixel_classifier(width, num_classes)
        self.auxiliary_head: FCN | None = None
        if auxiliary_width:
            self.auxiliary_head = FCN(
                channels,
                reductions,
                num_classes,
                level=-2,
                width=auxiliary_width,
                num_convs=1,
                concat_input=False,
                dropout=dropout,
            )

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """Maps features (B, C_i, H_i, W_i), the finest first, to logits (B, K, H_0, W_0)."""
        maps = [conv(x) for conv, x in zip(self.lateral_convs, features[:-1], strict=True)]
        maps.append(self.pyramid_pooling(features[-1]))
        for i in range(len(maps) - 1, 0, -1):
            maps[i - 1] = maps[i - 1] + resize(maps[i], maps[i - 1].shape[-2:])
        fused = [conv(x) for conv, x in zip(self.fpn_convs, maps[:-1], strict=True)] + maps[-1:]
        x = self.fpn_bottleneck(torch.cat([resize(x, maps[0].shape[-2:]) for x in fused], 1))
        return self.classifier(self.dropout(x))  # type: ignore[no-any-return]

    def with_auxiliary(self, features: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Returns the logits, and those of the auxiliary FCN (B, K, H_i, W_i) if there is one."""
        return self(features), [] if self.auxiliary_head is None else [self.auxiliary_head(features)]

    def classifiers(self) -> list[nn.Module]:
        """Returns the classifier, and that of the auxiliary FCN."""
        return [self.classifier] + ([] if self.auxiliary_head is None else [self.auxiliary_head.classifier])
