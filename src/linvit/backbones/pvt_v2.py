"""PVTv2: PVT with overlapping patches, and convolutions in the MLPs for positions; any attention in its blocks.

Paper: Wang et al. 2022, "PVT v2: Improved Baselines with Pyramid Vision Transformer". The FLatten presets follow Han et
al. 2023: focused attention in every block, no spatial reduction.

As in the reference code the patch embeddings' and reductions' LayerNorms have eps 1e-5, all others 1e-6. Published with
`drop_path_rate` 0.1 (b0 to b2) and 0.3 (b3 to b5).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from linvit.attention.base import Grid
from linvit.attention.focused import FocusedAttention
from linvit.backbones.base import Backbone, check_stages
from linvit.backbones.initialise import init_convs
from linvit.backbones.stage import Stage, pyramid_info, specs_and_rates, stage_grids
from linvit.errors import UserError
from linvit.image_size import image_size
from linvit.layers.attention_layer import AttentionLayer
from linvit.layers.block import Block
from linvit.layers.hosting import QKNorm
from linvit.layers.mlp import Mlp
from linvit.layers.patch_embed import PatchEmbed
from linvit.registry import Spec, preset


class PVTv2(Backbone):
    """PVTv2: four stages of strides 4, 8, 16 and 32, each with a norm at its end.

    For images of any size and aspect ratio: nothing depends on the grid. Strided convolutions round sizes up; spatial
    reduction drops rows and columns that do not fill a window.

    Args:
        sr_ratios: Spatial reduction of each stage: keys and values come from patches merged R x R; 1 is none. None is
            8, 4, 2, 1, except in blocks whose mechanism needs as many keys as queries (SOFT, Poly-NL, ...).
        linear: The linear variant (b2_li): in all stages keys and values come from patches pooled to 7 x 7, where the
            mechanism allows it, and a ReLU precedes the MLP's convolution. `sr_ratios` must then be None.
    """

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        img_size: int | Sequence[int] = 224,
        attention: Spec | Sequence[Spec] = "softmax",
        drop_path_rate: float = 0.0,
        embed_dims: Sequence[int] = (64, 128, 320, 512),
        depths: Sequence[int] = (2, 2, 2, 2),
        num_heads: Sequence[int] = (1, 2, 5, 8),
        mlp_ratios: Sequence[float] = (8, 8, 4, 4),
        sr_ratios: Sequence[int] | None = None,
        linear: bool = False,
        qkv_bias: bool = True,
        proj_drop: float = 0.0,
        qk_norm: QKNorm = "none",
    ) -> None:
        default = (1, 1, 1, 1) if linear else (8, 4, 2, 1)
        ratios = default if sr_ratios is None else sr_ratios
        sizes = {"embed_dims": embed_dims, "num_heads": num_heads, "mlp_ratios": mlp_ratios}
        check_stages(4, depths=depths, sr_ratios=ratios, **sizes)
        if linear and sr_ratios is not None:
            raise UserError(
                f"linear: true pools keys and values in all stages, so it excludes sr_ratios; got {list(sr_ratios)}. "
                f"Set sr_ratios: null or linear: false"
            )
        super().__init__(num_classes, embed_dims[-1])
        specs, rates = specs_and_rates(attention, drop_path_rate, depths)
        shared: dict[str, Any] = {"qkv_bias": qkv_bias, "proj_drop": proj_drop, "qk_norm": qk_norm}
        shared |= {"sr_pool": 7 if linear else 0, "sr_required": sr_ratios is not None}

        self.stages = nn.ModuleList()
        for i, size in enumerate(stage_grids(image_size(img_size))):
            dim = embed_dims[i]
            blocks = [
                Block(
                    dim,
                    AttentionLayer(dim, num_heads[i], Grid(size), attention=spec, sr_ratio=ratios[i], **shared),
                    Mlp(dim, int(dim * mlp_ratios[i]), conv=True, pre_act=linear),
                    rate,
                    norm_eps=1e-6,
                )
                for spec, rate in zip(specs[i], rates[i], strict=True)
            ]
            kernel, stride = (3, 2) if i else (7, 4)
            embed = PatchEmbed(in_chans, dim, kernel, stride, padding=kernel // 2)
            self.stages.append(Stage(dim, Grid(size), embed, blocks, norm=nn.LayerNorm(dim, eps=1e-6)))
            in_chans = dim
        self.finalize(nn.Identity(), pyramid_info(embed_dims))
        init_convs(self, by_fan_out, FocusedAttention)

    def init_attention(self, name: str, layer: nn.Module) -> None:
        """Also initialises convolutions as the reference does; see `Backbone.init_attention`."""
        super().init_attention(name, layer)
        init_convs(layer, by_fan_out, FocusedAttention)


def by_fan_out(conv: nn.Conv2d) -> None:
    """Sets the reference's initial values of a convolution."""
    fan_out = conv.weight[0, 0].numel() * conv.out_channels // conv.groups
    nn.init.normal_(conv.weight, std=(2 / fan_out) ** 0.5)


_flatten = partial(PVTv2, attention="focused", sr_ratios=(1, 1, 1, 1))

pvt_v2_b0 = preset(PVTv2, embed_dims=(32, 64, 160, 256))
pvt_v2_b1 = preset(PVTv2, depths=(2, 2, 2, 2))
pvt_v2_b2 = preset(PVTv2, depths=(3, 4, 6, 3))
pvt_v2_b3 = preset(PVTv2, depths=(3, 4, 18, 3))
pvt_v2_b4 = preset(PVTv2, depths=(3, 8, 27, 3))
pvt_v2_b5 = preset(PVTv2, depths=(3, 6, 40, 3), mlp_ratios=(4, 4, 4, 4))
pvt_v2_b2_li = preset(PVTv2, depths=(3, 4, 6, 3), linear=True)
flatten_pvt_v2_b0 = preset(_flatten, embed_dims=(32, 64, 160, 256))
flatten_pvt_v2_b1 = preset(_flatten, depths=(2, 2, 2, 2))
flatten_pvt_v2_b2 = preset(_flatten, depths=(3, 4, 6, 3))
flatten_pvt_v2_b3 = preset(_flatten, depths=(3, 4, 18, 3))
flatten_pvt_v2_b4 = preset(_flatten, depths=(3, 8, 27, 3))
