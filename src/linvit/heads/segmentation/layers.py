"""Layers that several heads of semantic segmentation have."""

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.errors import UserError


class ConvNormReLU(nn.Sequential):
    """Convolution without bias, BatchNorm, ReLU: (B, C, H, W) -> (B, C', H, W).

    Initial weights are normal, of a variance by the fan-out (He et al. 2015), as in mmsegmentation.
    So is the name `bn`: its recipes exclude LayerNorms from weight decay by `norm` in their names, and no BatchNorm.

    Args:
        in_channels: Channels C.
        out_channels: Channels C'.
        kernel: Side of the kernel, odd.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel: int = 3) -> None:
        conv = nn.Conv2d(in_channels, out_channels, kernel, padding=kernel // 2, bias=False)
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
        layers = OrderedDict(conv=conv, bn=nn.BatchNorm2d(out_channels), relu=nn.ReLU(inplace=True))
        super().__init__(layers)


class PyramidPooling(nn.Module):
    """Means of a map over grids of several sizes, beside the map itself: (B, C, H, W) -> (B, width, H, W).

    Paper: Zhao et al. 2017, "Pyramid Scene Parsing Network", Sec. 3.2. A map may be smaller than a grid. In training a
    batch has two images or more, for the sake of the BatchNorm behind the mean over the whole map.

    Args:
        channels: Channels C.
        width: Channels of each mean after its 1 x 1 convolution, and of the output.
        pool_sizes: Sides of the grids.
    """

    def __init__(self, channels: int, width: int, pool_sizes: Sequence[int] = (1, 2, 3, 6)) -> None:
        super().__init__()
        self.pool_sizes = tuple(pool_sizes)
        self.branches = nn.ModuleList(ConvNormReLU(channels, width, 1) for _ in self.pool_sizes)
        self.bottleneck = ConvNormReLU(channels + len(self.pool_sizes) * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, width, H, W)."""
        if self.training and len(x) == 1 and 1 in self.pool_sizes and isinstance(self.branches[0].bn, nn.BatchNorm2d):
            raise UserError(
                "a batch of one image cannot train pyramid pooling: BatchNorm behind the mean over the whole map has "
                "one number per channel. Take a batch of 2 images or more (--data.batch_size), or several devices with "
                "--trainer.sync_batchnorm=true"
            )
        size = x.shape[-2:]
        means = [
            resize(branch(F.adaptive_avg_pool2d(x, side)), size)
            for branch, side in zip(self.branches, self.pool_sizes, strict=True)
        ]
        return self.bottleneck(torch.cat([x, *means], 1))  # type: ignore[no-any-return]


def pixel_classifier(width: int, num_classes: int) -> nn.Conv2d:
    """Builds the 1 x 1 convolution from `width` channels to the logits: weights of deviation 0.01, biases 0."""
    conv = nn.Conv2d(width, num_classes, 1)
    nn.init.normal_(conv.weight, std=0.01)
    nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
    return conv


def resize(x: Tensor, size: Sequence[int]) -> Tensor:
    """Returns a map (B, C, h, w) resized to (B, C, H, W) by bilinear interpolation between the centres of pixels."""
    if tuple(x.shape[-2:]) == tuple(size):
        return x
    return F.interpolate(x, size=tuple(size), mode="bilinear", align_corners=False)
