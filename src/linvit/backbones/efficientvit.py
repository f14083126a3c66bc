"""EfficientViT: a pyramid of convolutions, with multi-scale ReLU linear attention in its last two stages.

Paper: Cai et al. 2023, "EfficientViT: Multi-Scale Linear Attention for High-Resolution Dense Prediction" (MIT;
other networks have that name). timm has a model of it with that attention, and calls this one `linvit_efficientvit_b0`.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from linvit.attention.base import Grid
from linvit.backbones.base import Backbone, check_stages
from linvit.backbones.mlla import ConvTokens
from linvit.backbones.stage import Stage, pyramid_info, specs_and_rates, stage_grids
from linvit.image_size import image_size
from linvit.layers.attention_layer import AttentionLayer
from linvit.layers.block import Block
from linvit.layers.hosting import QKNorm
from linvit.layers.mlp import BatchNormLinear, MBConv
from linvit.registry import Spec, preset

LITE_MLA = {"name": "enhanced_linear", "proj_norm": "bn2d"}


class EfficientViT(Backbone):
    """EfficientViT: four stages of strides 4, 8, 16 and 32; only BatchNorm, and no norm before attention.

    For images of any size and aspect ratio: nothing depends on the grid, and strided convolutions round sizes up.

    Args:
        attention: Attention of the last two stages: one spec, one for each of the two, or one per block.
        embed_dims: Channels of each stage; the stem has half of the first.
        depths: Blocks of each stage. Blocks of the first two are only convolutions, including the strided one, which
            in the last two precedes the blocks.
        num_heads: Heads of each stage; the first two have no attention.
        expand_ratio: Hidden width of the convolutions and feed-forward layers over C.
        head_widths: Channels of the layers between the last stage and the classifier: a linear layer with BatchNorm on
            every token, before the mean, and one with LayerNorm after it, both with hard-swish.
        stem_depth: Number of convolutions on a residual path after the first one.
    """

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        img_size: int | Sequence[int] = 224,
        attention: Spec | Sequence[Spec] = LITE_MLA,
        drop_path_rate: float = 0.0,
        embed_dims: Sequence[int] = (16, 32, 64, 128),
        depths: Sequence[int] = (2, 2, 2, 2),
        num_heads: Sequence[int] = (1, 2, 4, 8),
        expand_ratio: int = 4,
        head_widths: Sequence[int] = (1024, 1280),
        stem_depth: int = 1,
        qkv_bias: bool = False,
        proj_drop: float = 0.0,
        qk_norm: QKNorm = "none",
    ) -> None:
        check_stages(4, embed_dims=embed_dims, depths=depths, num_heads=num_heads)
        super().__init__(num_classes, embed_dims[-1])
        specs, rates = specs_and_rates(attention, drop_path_rate, depths[2:])
        stem = embed_dims[0] // 2
        residuals = (Residual(separable(stem, stem)) for _ in range(stem_depth))
        layers: list[nn.Module] = [nn.Sequential(conv(in_chans, stem, 3, 2), *residuals)]

        self.stages = nn.ModuleList()
        for i, size in enumerate(stage_grids(image_size(img_size))):
            dim, into, grid = embed_dims[i], embed_dims[i - 1] if i else stem, Grid(size)
            layers.append(nn.Sequential(inverted(into, dim, expand_ratio, 2, norms=i < 2)))
            blocks = []
            if i < 2:
                layers += [Residual(inverted(dim, dim, expand_ratio)) for _ in range(depths[i] - 1)]
            else:
                shared: dict[str, Any] = {"qkv_bias": qkv_bias, "proj_drop": proj_drop, "qk_norm": qk_norm}
                for spec, rate in zip(specs[i - 2], rates[i - 2], strict=True):
                    layer = AttentionLayer(dim, num_heads[i], grid, attention=spec, **shared)
                    blocks.append(Block(dim, layer, MBConv(dim, dim * expand_ratio), rate, norm_eps=None))
            self.stages.append(Stage(dim, grid, ConvTokens(*layers), blocks))
            layers = []
        width, self.head_hidden_size = head_widths
        self.final_proj = nn.Sequential(BatchNormLinear(embed_dims[-1], width), nn.Hardswish())
        last = nn.Linear(width, self.head_hidden_size, bias=False), nn.LayerNorm(self.head_hidden_size)
        self.pre_logits = nn.Sequential(*last, nn.Hardswish())
        self.finalize(nn.Identity(), pyramid_info(embed_dims))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Returns logits (B, num_classes) of tokens (B, N, C), or the classifier's input if `pre_logits`."""
        x = self.pre_logits(self.pool(self.final_proj(x)))
        return x if pre_logits else self.head(x)

    def prune_intermediate_layers(
        self, indices: int | list[int] | None = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drops the modules that are not needed for features at `indices`; see `Backbone.prune_intermediate_layers`."""
        if prune_head:
            self.final_proj, self.pre_logits = nn.Sequential(), nn.Sequential()
            self.head_hidden_size = self.num_features
        return super().prune_intermediate_layers(indices, prune_norm, prune_head)


class Residual(nn.Sequential):
    """`x + f(x)` of a plane (B, C, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H, W)."""
        return x + super().forward(x)  # type: ignore[no-any-return, no-untyped-call]


def conv(
    into: int, out: int, kernel: int = 1, stride: int = 1, *, groups: int = 1, norm: bool = True, act: bool = True
) -> nn.Sequential:
    """Builds a convolution with BatchNorm or a bias, and hard-swish."""
    made = nn.Sequential(OrderedDict(conv=nn.Conv2d(into, out, kernel, stride, kernel // 2, 1, groups, not norm)))
    if norm:
        made.add_module("norm", nn.BatchNorm2d(out))
    if act:
        made.add_module("act", nn.Hardswish())
    return made


def separable(into: int, out: int, stride: int = 1, norm: bool = True) -> OrderedDict[str, nn.Module]:
    """Builds a depthwise 3 x 3 convolution and a 1 x 1 convolution that ends in BatchNorm."""
    depthwise = conv(into, into, 3, stride, groups=into, norm=norm)
    return OrderedDict(depth_conv=depthwise, point_conv=conv(into, out, act=False))


def inverted(into: int, out: int, ratio: int, stride: int = 1, norms: bool = True) -> OrderedDict[str, nn.Module]:
    """Builds a 1 x 1 convolution to `ratio` times the channels, before the two of `separable`."""
    wide = into * ratio
    return OrderedDict(inverted_conv=conv(into, wide, norm=norms), **separable(wide, out, stride, norms))


efficientvit_b0 = preset(EfficientViT)
efficientvit_b1 = preset(
    EfficientViT,
    embed_dims=(32, 64, 128, 256),
    depths=(2, 3, 3, 4),
    num_heads=(2, 4, 8, 16),
    head_widths=(1536, 1600),
)
efficientvit_b2 = preset(
    EfficientViT,
    embed_dims=(48, 96, 192, 384),
    depths=(3, 4, 4, 6),
    num_heads=(1, 3, 6, 12),
    head_widths=(2304, 2560),
)
efficientvit_b3 = preset(
    EfficientViT,
    embed_dims=(64, 128, 256, 512),
    depths=(4, 6, 6, 9),
    num_heads=(2, 4, 8, 16),
    head_widths=(2304, 2560),
)
