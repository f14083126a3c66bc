"""CSWin Transformer: a pyramid whose attention runs in vertical and horizontal stripes.

Papers: Dong et al. 2022, "CSWin Transformer: A General Vision Transformer Backbone with Cross-Shaped Windows". The
FLatten presets follow Han et al. 2023, "FLatten Transformer": focused attention on the whole plane in the first two
stages, softmax in stripes in the others, and depths that differ from CSWin's. So do the Agent and InLine presets of Han
et al. 2024, with their mechanisms.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from torch import nn

from linvit.attention.base import Grid
from linvit.backbones.base import Backbone, check_stages
from linvit.backbones.stage import Stage, pyramid_info, specs_and_rates, stage_grids
from linvit.image_size import image_size
from linvit.layers.block import Block
from linvit.layers.hosting import QKNorm
from linvit.layers.mlp import FeedForward, feed_forward
from linvit.layers.patch_embed import PatchEmbed
from linvit.layers.stripes import StripeAttention
from linvit.registry import Spec, preset


class CSWin(Backbone):
    """CSWin: stages at strides 4, 8, 16, 32, for images of any aspect ratio and any size from 3 pixels.

    Nothing is interpolated for other image sizes than `img_size`: stripes are as long as the plane, a plane that is not
    divisible by their width is padded as in CSWin's dense models, and stages of one branch (the last, and those whose
    stripes cover the plane of an `img_size` image) are global at every size. The stem pads by 2 under a kernel of 7, so
    a side of S pixels makes (S + 1) // 4 patches; each further stage halves it, rounding up.

    Args:
        img_size: Side, or (H, W), of the images for which the mechanisms are built. It determines which stages have one
            branch.
        embed_dim: Channels of the first stage, doubled by every further one; or a list with one number per stage.
        split_size: Width of the stripes per stage; None is the whole plane. The last stage always uses the
            whole plane.
        input_before_norm: Pass the block's input before its first norm to mechanisms that use the layer's input, as the
            authors of InLine do.
    """

    dense: ClassVar[Mapping[str, Any]] = {"feature_norms": True}

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        img_size: int | Sequence[int] = 224,
        attention: Spec | Sequence[Spec] = "softmax",
        drop_path_rate: float = 0.0,
        embed_dim: int | Sequence[int] = 64,
        depths: Sequence[int] = (1, 2, 21, 1),
        num_heads: Sequence[int] = (2, 4, 8, 16),
        split_size: Sequence[int | None] = (1, 2, 7, 7),
        mlp_ratio: float = 4.0,
        ffn: FeedForward = "mlp",
        qkv_bias: bool = True,
        proj_drop: float = 0.0,
        qk_norm: QKNorm = "none",
        input_before_norm: bool = False,
        feature_norms: bool = False,
    ) -> None:
        count = len(depths)
        dims = [embed_dim * 2**i for i in range(count)] if isinstance(embed_dim, int) else list(embed_dim)
        check_stages(count, embed_dim=dims, num_heads=num_heads, split_size=split_size)
        super().__init__(num_classes, dims[-1])

        height, width = image_size(img_size)
        sizes = stage_grids(((height + 1) // 4, (width + 1) // 4), strides=[1] + [2] * (count - 1))
        specs, rates = specs_and_rates(attention, drop_path_rate, depths)
        self.stages = nn.ModuleList(
            Stage(
                dim,
                Grid(sizes[i]),
                PatchEmbed(dims[i - 1], dim, 3, 2, 1) if i else PatchEmbed(in_chans, dim, 7, 4, 2),
                [
                    Block(
                        dim,
                        StripeAttention(
                            dim,
                            num_heads[i],
                            Grid(sizes[i]),
                            split_size[i] if i < count - 1 else None,
                            attention=spec,
                            qkv_bias=qkv_bias,
                            proj_drop=proj_drop,
                            qk_norm=qk_norm,
                        ),
                        feed_forward(ffn, dim, int(dim * mlp_ratio)),
                        rate,
                        norm_eps=1e-5,
                        input_before_norm=input_before_norm,
                    )
                    for spec, rate in zip(specs[i], rates[i], strict=True)
                ],
            )
            for i, dim in enumerate(dims)
        )
        self.feature_norms = nn.ModuleList(nn.LayerNorm(dim) for dim in dims[:-1] if feature_norms)
        self.finalize(nn.LayerNorm(dims[-1]), pyramid_info(dims))


_wide_stripes = (1, 2, 12, 12)  # at 384 pixels

cswin_tiny = preset(CSWin, embed_dim=64, depths=(1, 2, 21, 1), num_heads=(2, 4, 8, 16))
cswin_small = preset(CSWin, embed_dim=64, depths=(2, 4, 32, 2), num_heads=(2, 4, 8, 16))
cswin_base = preset(CSWin, embed_dim=96, depths=(2, 4, 32, 2), num_heads=(4, 8, 16, 32))
cswin_base_384 = preset(cswin_base, img_size=384, split_size=_wide_stripes)
cswin_large = preset(CSWin, embed_dim=144, depths=(2, 4, 32, 2), num_heads=(6, 12, 24, 24))
cswin_large_384 = preset(cswin_large, img_size=384, split_size=_wide_stripes)

_focused = ("focused", "focused", "softmax", "softmax")
_tiny = partial(CSWin, embed_dim=64, depths=(2, 4, 18, 1), num_heads=(2, 4, 8, 16), split_size=(None, None, 7, 7))
_small = partial(_tiny, depths=(3, 6, 29, 2))
_base = partial(CSWin, embed_dim=96, depths=(3, 6, 29, 2), num_heads=(4, 8, 16, 32), split_size=(None, None, 7, 7))
flatten_cswin_tiny = preset(_tiny, attention=_focused)
flatten_cswin_small = preset(_tiny, attention=_focused, depths=(2, 4, 32, 2))
flatten_cswin_base = preset(_base, attention=_focused)
flatten_cswin_base_384 = preset(flatten_cswin_base, img_size=384, split_size=(None, None, 12, 12))

_agents = (
    {"name": "agent", "agents": 9, "dwc_kernel": 0},
    {"name": "agent", "agents": 16, "dwc_kernel": 0},
    "softmax",
    "softmax",
)
agent_cswin_tiny = preset(_tiny, attention=_agents)
agent_cswin_small = preset(_small, attention=_agents)
agent_cswin_base = preset(_base, attention=_agents)
agent_cswin_base_384 = preset(agent_cswin_base, img_size=384, split_size=(None, None, 12, 12))

_inline = ("inline", "inline", "softmax", "softmax")
inline_cswin_tiny = preset(_tiny, attention=_inline, input_before_norm=True)
inline_cswin_small = preset(_small, attention=_inline, input_before_norm=True)
inline_cswin_base = preset(_base, attention=_inline, input_before_norm=True)
