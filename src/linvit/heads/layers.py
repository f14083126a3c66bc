"""Layers shared by heads: convolutions with the initial values of mmsegmentation and mmdetection, pyramids."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal

import torch
from timm.layers import LayerNorm2d
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import ExtraFPNBlock

from linvit.attention.ops.functional import pooled, same_size
from linvit.errors import UserError


class ConvNormReLU(nn.Sequential):
    """Convolution without bias, BatchNorm, ReLU: (B, C, H, W) -> (B, C', H, W).

    Initial weights are normal, with a variance by the fan-out (He et al. 2015), as in mmsegmentation.
    The name `bn` is mmsegmentation's: its recipes exclude `norm` (LayerNorms) from weight decay, but not BatchNorm.
    With `layer_norm` it has a LayerNorm over the channels, `norm`, instead.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel: int = 3, layer_norm: bool = False) -> None:
        conv = nn.Conv2d(in_channels, out_channels, kernel, padding=kernel // 2, bias=False)
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
        norm = {"norm": LayerNorm2d(out_channels)} if layer_norm else {"bn": nn.BatchNorm2d(out_channels)}
        super().__init__(OrderedDict(conv=conv, **norm, relu=nn.ReLU(inplace=True)))


class PyramidPooling(nn.Module):
    """Means of a map over grids of several sizes, beside the map itself: (B, C, H, W) -> (B, width, H, W).

    Paper: Zhao et al. 2017, "Pyramid Scene Parsing Network", Sec. 3.2. A map may be smaller than a grid. Training needs
    batches of two images or more, because of the BatchNorm after the mean over the whole map.
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
                "one number per channel. Use a batch of 2 images or more (--data.batch_size), or several devices with "
                "--trainer.sync_batchnorm=true"
            )
        size = x.shape[-2:]
        means = [
            resize(branch(pooled(x, side)), size) for branch, side in zip(self.branches, self.pool_sizes, strict=True)
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
    if same_size(x.shape[-2:], size):
        return x
    return F.interpolate(x, size=tuple(size), mode="bilinear", align_corners=False)


def conv(into: int, out: int, kernel: int = 3, std: float = 0.01) -> nn.Conv2d:
    """Builds a convolution that keeps the size, with normal initial weights and zero biases."""
    layer = nn.Conv2d(into, out, kernel, padding=kernel // 2)
    nn.init.normal_(layer.weight, std=std)
    nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return layer


def tower(width: int, convs: int) -> nn.Sequential:
    """Builds convolutions 3 x 3, each with a ReLU."""
    return nn.Sequential(*(nn.Sequential(conv(width, width), nn.ReLU(inplace=True)) for _ in range(convs)))


class FPN(FeaturePyramidNetwork):  # type: ignore[misc]  # torchvision has no types
    """torchvision's feature pyramid on lists of maps: (B, C_i, H_i, W_i) to (B, width, H_i, W_i), the finest first.

    Paper: Lin et al. 2017, "Feature Pyramid Networks for Object Detection". Convolutions have biases and
    no norms. Initial weights are uniform (Glorot and Bengio 2010) and biases 0, as in mmdetection and mmsegmentation.
    `extra_levels` adds coarser maps; without `join` it adds only these, to maps of `width` channels.
    """

    def __init__(
        self, channels: Sequence[int], width: int = 256, extra_levels: ExtraFPNBlock | None = None, join: bool = True
    ) -> None:
        if not join and {*channels} != {width}:
            raise UserError(f"fpn: false is for maps of {width} channels, the head's width; got {list(channels)}")
        super().__init__(list(channels) if join else [], width, extra_levels)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]

    def forward(self, features: Sequence[Tensor]) -> list[Tensor]:
        """Maps feature maps to maps of one width, as many or, with extra levels, more."""
        if self.inner_blocks:
            return list(super().forward({str(i): feature for i, feature in enumerate(features)}).values())
        maps = list(features)
        return maps if self.extra_blocks is None else self.extra_blocks(maps, maps, [""] * len(maps))[0]


class TwoMoreLevels(ExtraFPNBlock):  # type: ignore[misc]  # torchvision has no types
    """P6 and P7 by convolutions of stride 2 (Lin et al. 2017, "Focal Loss for Dense Object Detection", footnote 2).

    P6 is made from C5 ("input") or P5 ("output"). torchvision's `LastLevelP6P7` has a ReLU between them, which
    mmdetection's RetinaNet does not have, and makes P6 from P5 if that has as many channels as C5.
    """

    def __init__(
        self, channels: int, width: int, source: Literal["input", "output"] = "input", relu: bool = False
    ) -> None:
        super().__init__()
        self.source, self.relu = source, relu
        into = channels if source == "input" else width
        self.p6, self.p7 = (nn.Conv2d(c, width, 3, stride=2, padding=1) for c in (into, width))

    def forward(self, results: list[Tensor], maps: list[Tensor], names: list[str]) -> tuple[list[Tensor], list[str]]:
        """Adds P6 and P7 to the maps of the pyramid."""
        p6 = self.p6(maps[-1] if self.source == "input" else results[-1])
        p7 = self.p7(F.relu(p6) if self.relu else p6)
        return [*results, p6, p7], [*names, "p6", "p7"]
