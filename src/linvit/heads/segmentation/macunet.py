"""MACU-Net: a U-Net in which every level joins the maps of all others, weighted by channel attention.

Paper: Li et al. 2022, "MACU-Net for Semantic Segmentation of Fine-Resolution Remotely Sensed Images". The backbone
`macunet_encoder` makes the paper's network of it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.heads.layers import resize
from linvit.heads.segmentation.base import SegmentationHead
from linvit.layers.ac_block import ACBlock


class MACUNet(SegmentationHead):
    """Skip connections of all scales and channel attention on a pyramid of any number of levels.

    Level i joins as many maps of its width as there are levels: the result of each coarser level, upsampled by one
    transposed convolution per level; its own feature; each finer feature, halved by one pooling and AC block per level.
    All layers have PyTorch's initial values, as in the reference.

    Args:
        reductions: Image side over map side of each map, each twice the previous one; the paper's are 1, 2, 4, 8, 16.
        bottleneck: Ratio of channels to hidden channels in the channel attention.
    """

    def __init__(
        self, channels: Sequence[int], reductions: Sequence[int], num_classes: int, *, bottleneck: int = 16
    ) -> None:
        super().__init__(channels, reductions, num_classes)
        self.check_pyramid(doubling=True)
        self.reduction = reductions[0]
        last = len(channels) - 1
        # "0_2" ends at level 2 and begins at level 0, through "0_1"; the coarsest level has no skip connections.
        self.downs = nn.ModuleDict(
            {f"{i}_{j}": ACBlock(channels[j - 1], channels[j]) for i in range(last) for j in range(i + 1, last)}
        )
        self.ups = nn.ModuleDict(
            {
                f"{i}_{j}": nn.ConvTranspose2d(channels[j + 1], channels[j], 2, stride=2)
                for i in range(last, 0, -1)
                for j in range(i - 1, -1, -1)
            }
        )
        self.attentions = nn.ModuleList(
            ChannelReweighting(len(channels) * dim, 2 * dim, bottleneck) for dim in channels[:-1]
        )
        self.blocks = nn.ModuleList(nn.Sequential(ACBlock(2 * dim, dim), ACBlock(dim, dim)) for dim in channels[:-1])
        self.classifier = nn.Conv2d(channels[0], num_classes, 1)

    @classmethod
    def levels(cls, reductions: Sequence[int]) -> list[int]:
        """Returns the positions of all feature maps."""
        return list(range(len(reductions)))

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """Maps features (B, C_i, H_i, W_i), the finest first, to logits (B, K, H_0, W_0)."""
        sizes = [feature.shape[-2:] for feature in features]
        last = len(features) - 1
        finer: list[list[Tensor]] = [[] for _ in features]  # of each level, from the nearest
        for j in range(1, last):
            for i, x in zip(range(j - 1, -1, -1), [features[j - 1], *finer[j - 1]], strict=True):
                halved = resize(F.max_pool2d(x, 2, ceil_mode=True), sizes[j])
                finer[j].append(self.downs[f"{i}_{j}"](halved))
        coarser = {last: features[last]}  # by the level that each comes from, brought down to the present level
        for j in range(last - 1, -1, -1):
            coarser = {i: resize(self.ups[f"{i}_{j}"](x), sizes[j]) for i, x in coarser.items()}
            order = [j + 1, *range(last, j + 1, -1)]  # the next level, then from the coarsest on
            joined = torch.cat([*(coarser[i] for i in order), features[j], *finer[j]], 1)
            coarser[j] = self.blocks[j](self.attentions[j](joined))
        return self.classifier(coarser[0])  # type: ignore[no-any-return]


class ChannelReweighting(nn.Module):
    """A 1 x 1 convolution whose channels are weighted by their means and maxima: (B, C, H, W) -> (B, C', H, W)."""

    def __init__(self, in_channels: int, out_channels: int, bottleneck: int = 16) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 1, bias=False)
        hidden = max(1, out_channels // bottleneck)

        def weights() -> nn.Sequential:
            """Builds a network of one hidden layer on pooled channels (B, C', 1, 1)."""
            squeeze = nn.Conv2d(out_channels, hidden, 1, bias=False)
            return nn.Sequential(squeeze, nn.ReLU(), nn.Conv2d(hidden, out_channels, 1, bias=False))

        self.of_means = weights()
        self.of_maxima = weights()

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C', H, W)."""
        x = self.conv(x)
        means, maxima = F.adaptive_avg_pool2d(x, 1), F.adaptive_max_pool2d(x, 1)
        return x * torch.sigmoid(self.of_means(means) + self.of_maxima(maxima))
