"""MLLA: a pyramid of linear attention in blocks with a convolution before attention and a gate after it.

Paper: Han et al. 2024, "Demystify Mamba in Vision: A Linear Attention Perspective", whose final version calls the model
MILA. The convolution and the gate are the attention's: `mlla` declares them, and its layer has them.

Published with `drop_path_rate` 0.2 (tiny), 0.3 (small) and 0.5 (base).
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from linvit.attention.base import Grid
from linvit.backbones.base import Backbone, check_stages
from linvit.backbones.stage import Stage, pyramid_info, specs_and_rates, stage_grids
from linvit.image_size import image_size
from linvit.layers.attention_layer import AttentionLayer
from linvit.layers.block import Block
from linvit.layers.hosting import QKNorm
from linvit.layers.mlp import Mlp
from linvit.registry import Spec, preset


class MLLA(Backbone):
    """MLLA: four stages of strides 4, 8, 16 and 32, each with twice the channels of the previous one.

    For images of any size and aspect ratio: nothing depends on the grid, and strided convolutions round sizes up. The
    reference for classification accepts images of only one size.

    Args:
        embed_dim: Channels C of stage 1, doubled by each further stage; or a list with one number per stage.
        proj_bias: Bias in the output projection of attention, for all stages or one per stage.
    """

    dense: ClassVar[Mapping[str, Any]] = {"feature_norms": True}
    cpe: ClassVar[int] = 2  # convolutions of a block
    last_norm: ClassVar[type[nn.Module]] = nn.LayerNorm

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        img_size: int | Sequence[int] = 224,
        attention: Spec | Sequence[Spec] = "mlla",
        drop_path_rate: float = 0.0,
        embed_dim: int | Sequence[int] = 64,
        depths: Sequence[int] = (2, 4, 8, 4),
        num_heads: Sequence[int] = (2, 4, 8, 16),
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        proj_bias: bool | Sequence[bool] = True,
        proj_drop: float = 0.0,
        qk_norm: QKNorm = "none",
        feature_norms: bool = False,
    ) -> None:
        biases = [proj_bias] * len(depths) if isinstance(proj_bias, bool) else proj_bias
        dims = [embed_dim * 2**i for i in range(len(depths))] if isinstance(embed_dim, int) else list(embed_dim)
        check_stages(len(depths), embed_dim=dims, num_heads=num_heads, proj_bias=biases)
        super().__init__(num_classes, dims[-1])
        specs, rates = specs_and_rates(attention, drop_path_rate, depths)
        shared: dict[str, Any] = {"qkv_bias": qkv_bias, "proj_drop": proj_drop, "qk_norm": qk_norm}

        self.stages = nn.ModuleList()
        for i, size in enumerate(stage_grids(image_size(img_size), [4] + [2] * (len(depths) - 1))):
            dim, grid = dims[i], Grid(size)
            blocks = [
                Block(
                    dim,
                    AttentionLayer(dim, num_heads[i], grid, attention=spec, proj_bias=biases[i], **shared),
                    self.mlp(dim, int(dim * mlp_ratio)),
                    rate,
                    norm_eps=1e-5,
                    cpe=self.cpe,
                )
                for spec, rate in zip(specs[i], rates[i], strict=True)
            ]
            embed = merging(dims[i - 1], dim) if i else self.stem(in_chans, dim)
            self.stages.append(Stage(dim, grid, embed, blocks))
        self.feature_norms = nn.ModuleList(nn.LayerNorm(dim) for dim in dims[:-1] if feature_norms)
        self.finalize((nn.LayerNorm if feature_norms else self.last_norm)(dims[-1]), pyramid_info(dims))

    def stem(self, in_chans: int, dim: int) -> nn.Module:
        """Builds the layers that turn images into tokens."""
        return ResidualStem(in_chans, dim)

    def mlp(self, dim: int, hidden: int) -> nn.Module:
        """Builds the MLP of a block."""
        return Mlp(dim, hidden)


class ResidualStem(nn.Module):
    """Five convolutions with BatchNorm, two of them on a residual path; (B, C, H, W) -> tokens (B, N, dim) and grid."""

    def __init__(self, in_chans: int, dim: int) -> None:
        super().__init__()
        half = dim // 2
        self.conv1 = nn.Sequential(*normed_conv(in_chans, half, 3, stride=2), nn.ReLU())
        self.conv2 = nn.Sequential(*normed_conv(half, half, 3), nn.ReLU(), *normed_conv(half, half, 3))
        self.conv3 = nn.Sequential(*normed_conv(half, 4 * dim, 3, stride=2), nn.ReLU(), *normed_conv(4 * dim, dim, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Returns tokens and their patch grid."""
        x = self.conv1(x)
        x = self.conv3(x + self.conv2(x))  # (B, dim, H', W')
        return x.flatten(2).mT, (x.shape[2], x.shape[3])


def normed_conv(into: int, out: int, kernel: int, stride: int = 1) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    """Returns a convolution without a bias and its BatchNorm."""
    return nn.Conv2d(into, out, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(out)


class ConvTokens(nn.Module):
    """Maps (B, C, H, W) to tokens (B, N, C') and their grid, by a sequence of layers."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Returns tokens and their patch grid."""
        x = self.conv(x)  # (B, C', H', W')
        return x.flatten(2).mT, (x.shape[2], x.shape[3])


def merging(into: int, dim: int) -> ConvTokens:
    """Builds a strided depthwise convolution of four times the channels, between two 1 x 1, and BatchNorm."""
    wide = 4 * dim
    depthwise = nn.Conv2d(wide, wide, 3, 2, padding=1, groups=wide)
    last = nn.Conv2d(wide, dim, 1), nn.BatchNorm2d(dim)
    return ConvTokens(nn.Conv2d(into, wide, 1), nn.ReLU(), depthwise, nn.ReLU(), *last)


mlla_tiny = preset(MLLA)
mlla_small = preset(MLLA, depths=(3, 6, 21, 6))
mlla_base = preset(MLLA, embed_dim=96, depths=(3, 6, 21, 6), num_heads=(3, 6, 12, 24))
