"""MAResU-Net: a U-Net with linear attention in its skip connections, on a ResNet or any other pyramid.

Paper: Li et al. 2021, "Multistage Attention ResU-Net for Semantic Segmentation of Fine-Resolution Remote Sensing
Images". The reference accepts only square images, since it exchanges height and width; here any size is accepted.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.base import Grid
from linvit.backbones.initialise import tie_mechanisms
from linvit.errors import UserError
from linvit.heads.layers import resize
from linvit.heads.segmentation.attention_skip import TAYLOR, AttentionSkip
from linvit.heads.segmentation.base import SegmentationHead
from linvit.image_size import image_size
from linvit.registry import Spec


class MAResUNet(SegmentationHead):
    """Attention on every map, and a decoder that adds each to the upsampled coarser one; logits of a quarter reduction.

    On a pyramid that begins at a reduction of 4, such as ResNet-34 in the paper, logits have the size of the image. All
    layers have PyTorch's initial values, as in the reference.

    Args:
        reductions: Image side over map side of each map: 4 first, each twice the previous one.
        img_size: Side, or (H, W), of the images, for mechanisms with parameters of fixed length.
        attention: Mechanism over positions: one spec for all maps, or a list with one per map.
        num_heads: Its heads.
        channel_attention: Attention over channels: "softmax" (the paper) or "linear" (by the same authors).
        dropout: Fraction of the channels that are dropped before each 1 x 1 convolution of the skips in training.
        width: Channels of the last two layers before the classifier.
    """

    def __init__(
        self,
        channels: Sequence[int],
        reductions: Sequence[int],
        num_classes: int,
        img_size: int | Sequence[int] = 224,
        *,
        attention: Spec | Sequence[Spec] = TAYLOR,
        num_heads: int = 1,
        channel_attention: Literal["softmax", "linear"] = "softmax",
        dropout: float = 0.1,
        width: int = 32,
    ) -> None:
        super().__init__(channels, reductions, num_classes)
        self.check_pyramid(levels=1, doubling=True)
        specs = [attention] * len(channels) if isinstance(attention, str | Mapping) else list(attention)
        if len(specs) != len(channels):
            raise UserError(f"attention lists {len(specs)} specs for {len(channels)} feature maps; give one for each")
        height, width_of_image = image_size(img_size)
        self.skips = nn.ModuleList()
        for dim, reduction, spec in zip(channels, reductions, specs, strict=True):
            grid = Grid((-(-height // reduction), -(-width_of_image // reduction)))
            self.skips.append(AttentionSkip(dim, grid, spec, num_heads, channel_attention, dropout))
        finer = [channels[0], *channels[:-1]]
        self.decoders = nn.ModuleList(Decoder(into, out) for into, out in zip(channels, finer, strict=True))
        self.upsample = nn.ConvTranspose2d(channels[0], width, 4, stride=2, padding=1)
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.classifier = nn.Conv2d(width, num_classes, 3, padding=1)
        self.reduction = max(1, reductions[0] // 4)
        tie_mechanisms(self)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """Maps features (B, C_i, H_i, W_i), the finest first, to logits (B, K, 4 H_0, 4 W_0)."""
        x = self.skips[-1](features[-1])
        for skip, decoder, feature in reversed(list(zip(self.skips, self.decoders[1:], features[:-1], strict=False))):
            x = resize(decoder(x), feature.shape[-2:]) + skip(feature)
        x = F.relu(self.upsample(self.decoders[0](x)))
        return self.classifier(F.relu(self.conv(x)))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Maps (B, C, H, W) to (B, C', 2 H, 2 W): a transposed convolution of stride 2 on a quarter of the channels.

    1 x 1 convolutions precede and follow it; each of the three is followed by BatchNorm and ReLU.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        inner = max(1, in_channels // 4)
        self.conv1 = nn.Conv2d(in_channels, inner, 1)
        self.norm1 = nn.BatchNorm2d(inner)
        self.upsample = nn.ConvTranspose2d(inner, inner, 3, stride=2, padding=1, output_padding=1)
        self.norm2 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, out_channels, 1)
        self.norm3 = nn.BatchNorm2d(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C', 2 H, 2 W)."""
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(self.norm2(self.upsample(x)))
        return F.relu(self.norm3(self.conv2(x)))
