"""H-ViT^3: a convolutional pyramid of test-time training layers with rotary positions.

Paper: Han et al. 2026, "ViT^3: Unlocking Test-Time Training in Vision" (CVPR). The plain models, `vittt_tiny` and so
on, are presets of DeiT.

Published with `drop_path_rate` 0.2 (tiny), 0.4 (small) and 0.6 (base).
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from linvit.attention.base import Grid
from linvit.backbones.base import Backbone, check_stages
from linvit.backbones.mlla import ConvMerging, normed_conv
from linvit.backbones.ravlt import ConvMlp
from linvit.backbones.stage import Stage, pyramid_info, specs_and_rates, stage_grids
from linvit.image_size import image_size
from linvit.layers.attention_layer import AttentionLayer
from linvit.layers.block import CPEBlock
from linvit.layers.hosting import QKNorm
from linvit.registry import Spec, preset

TTT = {"name": "vittt", "rotary": True}


class HViTTT(Backbone):
    """H-ViT^3: four stages of strides 4, 8, 16 and 32, with convolutions at their beginning, in blocks and in MLPs.

    Images of any size and aspect: nothing depends on the grid, and strided convolutions round sizes up. The reference
    for classification takes images of one size alone.

    Args:
        feature_norms: A LayerNorm for each feature, that of the last in place of the final BatchNorm (the reference for
            dense prediction).
    """

    dense: ClassVar[Mapping[str, Any]] = {"feature_norms": True}

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        img_size: int | Sequence[int] = 224,
        attention: Spec | Sequence[Spec] = TTT,
        drop_path_rate: float = 0.0,
        embed_dims: Sequence[int] = (64, 128, 320, 512),
        depths: Sequence[int] = (1, 3, 9, 4),
        num_heads: Sequence[int] = (2, 4, 10, 16),
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        proj_drop: float = 0.0,
        qk_norm: QKNorm = "none",
        feature_norms: bool = False,
    ) -> None:
        check_stages(4, embed_dims=embed_dims, depths=depths, num_heads=num_heads)
        super().__init__(num_classes, embed_dims[-1])
        specs, rates = specs_and_rates(attention, drop_path_rate, depths)
        shared: dict[str, Any] = {"qkv_bias": qkv_bias, "proj_drop": proj_drop, "qk_norm": qk_norm}

        self.stages = nn.ModuleList()
        for i, size in enumerate(stage_grids(image_size(img_size))):
            dim, grid = embed_dims[i], Grid(size)
            blocks = [
                CPEBlock(
                    dim,
                    AttentionLayer(dim, num_heads[i], grid, attention=spec, **shared),
                    ConvMlp(dim, int(dim * mlp_ratio), last_act=True),
                    rate,
                    norm_eps=1e-5,
                )
                for spec, rate in zip(specs[i], rates[i], strict=True)
            ]
            embed = ConvMerging(embed_dims[i - 1], dim) if i else PlainStem(in_chans, dim)
            self.stages.append(Stage(dim, grid, embed, blocks))
        self.feature_norms = nn.ModuleList(nn.LayerNorm(dim) for dim in embed_dims[:-1] if feature_norms)
        norm = nn.LayerNorm if feature_norms else TokenBatchNorm
        self.finalize(norm(embed_dims[-1]), pyramid_info(embed_dims))


class PlainStem(nn.Module):
    """Five convolutions with BatchNorm, ReLU between them; (B, C, H, W) -> tokens (B, N, dim) and their grid."""

    def __init__(self, in_chans: int, dim: int) -> None:
        super().__init__()
        half, layers = dim // 2, list[nn.Module]()
        for into, out, stride in ((in_chans, half, 2), (half, half, 1), (half, half, 1), (half, 4 * dim, 2)):
            layers += [*normed_conv(into, out, 3, stride), nn.ReLU()]
        self.conv = nn.Sequential(*layers, *normed_conv(4 * dim, dim, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Returns tokens and their patch grid."""
        x = self.conv(x)  # (B, dim, H', W')
        return x.flatten(2).mT, (x.shape[2], x.shape[3])


class TokenBatchNorm(nn.BatchNorm1d):
    """BatchNorm of each channel over all tokens of the batch, (B, N, C) -> (B, N, C)."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, C) -> (B, N, C)."""
        return super().forward(x.flatten(0, 1)).view_as(x)


h_vittt_tiny = preset(HViTTT)
h_vittt_small = preset(HViTTT, depths=(2, 6, 18, 8))
h_vittt_base = preset(HViTTT, embed_dims=(96, 192, 448, 640), depths=(2, 6, 18, 8), num_heads=(3, 6, 14, 20))
