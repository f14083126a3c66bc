"""RAVLT, MAViT, NaLaFormer and PolaFormer++: a convolutional pyramid with linear attention in its first two stages.

Papers: Fan et al. 2025, "Breaking the Low-Rank Dilemma of Linear Attention" (RALA, the `ravlt` models); Fan et al.
2025, "Rectifying Magnitude Neglect in Linear Attention" (MALA, `mavit`); Meng et al. 2026, "Norm x Direction: Restoring
the Missing Query Norm in Vision Linear Attention" (NaLa, `nalaformer`); Meng et al., PolaFormer++ (`pola_pp`).

The four repositories share one network and differ in the attention of stages 1 and 2. Stages 3 and 4 have softmax with
rotary positions, a depthwise convolution of the values and an output gate. Published with `drop_path_rate` 0.1 (t, xt,
b0 to b2), 0.15 (s, b3), 0.4 (b, b4) and 0.55 (l, b5). NaLaFormer's table gives 8 million parameters for its xt;
its code, which linvit follows, has 6.1 million.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from timm.layers import trunc_normal_
from torch import Tensor, nn

from linvit.attention.base import Grid
from linvit.attention.ops.rotary import RotaryLinearAttention
from linvit.attention.softmax import SoftmaxAttention
from linvit.backbones.base import Backbone, check_stages
from linvit.backbones.initialise import init_convs
from linvit.backbones.stage import Stage, pyramid_info, specs_and_rates, stage_grids
from linvit.image_size import image_size
from linvit.layers.attention_layer import AttentionLayer
from linvit.layers.block import Block, ResidualConv
from linvit.layers.hosting import QKNorm
from linvit.layers.mlp import BatchNormLinear, Linear
from linvit.layers.patch_embed import ConvEmbed
from linvit.registry import Spec, preset

SOFTMAX = {"name": "softmax", "rotary": True, "lepe_kernel": 5, "gate": "linear"}
NALA_SOFTMAX = {**SOFTMAX, "gate": "silu", "out_norm": "ln"}


class RAVLT(Backbone):
    """RAVLT: four stages of strides 4, 8, 16 and 32, with convolutions before the stages, in blocks and in MLPs.

    For images of any size and aspect ratio: nothing depends on the grid, and strided convolutions round sizes up.

    Args:
        head_width: Channels between the last stage and the classifier: a linear layer with BatchNorm and SiLU on every
            token, before their mean.
        layer_scale: Initial value of the learnable factors on the branches of blocks, per stage.
        second_cpe: Add a second convolution for positions in each block, before the MLP (NaLaFormer).
        torch_init: Keep PyTorch's initial values of linear layers, as the codes of NaLaFormer and PolaFormer++ do.
        feature_norms: Add a LayerNorm to each feature (as in the reference for dense prediction).
            `forward_intermediates(norm=True)` applies them; the classifier does not use them.
    """

    dense: ClassVar[Mapping[str, Any]] = {"feature_norms": True}

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        img_size: int | Sequence[int] = 224,
        attention: Spec | Sequence[Spec] = ("rala", "rala", SOFTMAX, SOFTMAX),
        drop_path_rate: float = 0.0,
        embed_dims: Sequence[int] = (64, 128, 256, 512),
        depths: Sequence[int] = (2, 2, 6, 2),
        num_heads: Sequence[int] = (1, 2, 4, 8),
        mlp_ratio: float = 3.5,
        head_width: int = 1024,
        layer_scale: Sequence[float] = (1, 1, 1, 1),
        second_cpe: bool = False,
        torch_init: bool = False,
        qkv_bias: bool = True,
        proj_drop: float = 0.0,
        qk_norm: QKNorm = "none",
        feature_norms: bool = False,
    ) -> None:
        check_stages(4, embed_dims=embed_dims, depths=depths, num_heads=num_heads, layer_scale=layer_scale)
        super().__init__(num_classes, embed_dims[-1])
        self.head_hidden_size = head_width
        specs, rates = specs_and_rates(attention, drop_path_rate, depths)

        self.stages = nn.ModuleList()
        for i, size in enumerate(stage_grids(image_size(img_size))):
            dim, grid = embed_dims[i], Grid(size)
            blocks = [
                Block(
                    dim,
                    AttentionLayer(
                        dim, num_heads[i], grid, attention=spec, qkv_bias=qkv_bias, proj_drop=proj_drop, qk_norm=qk_norm
                    ),
                    ConvMlp(dim, int(dim * mlp_ratio)),
                    rate,
                    norm_eps=1e-6,
                    cpe=2 if second_cpe else 1,
                    layer_scale=layer_scale[i],
                )
                for spec, rate in zip(specs[i], rates[i], strict=True)
            ]
            widths, strides = ([embed_dims[i - 1]], [2]) if i else ([in_chans, *[dim // 2] * 3], [2, 1, 1, 2])
            embed = ConvEmbed([*widths, dim], strides, act=nn.GELU, last_act=False)
            self.stages.append(Stage(dim, grid, embed, blocks))
        self.final_proj = nn.Sequential(BatchNormLinear(embed_dims[-1], head_width, bias=True), nn.SiLU())
        self.feature_norms = nn.ModuleList(nn.LayerNorm(dim, eps=1e-6) for dim in embed_dims if feature_norms)
        self.finalize(nn.Identity(), pyramid_info(embed_dims), initialise=nn.Identity() if torch_init else None)
        self.torch_init = torch_init
        init_convs(self, as_linear, RotaryLinearAttention | SoftmaxAttention)

    def init_attention(self, name: str, layer: nn.Module) -> None:
        """Also initialises convolutions as the reference does; see `Backbone.init_attention`."""
        if not self.torch_init:
            super().init_attention(name, layer)
        init_convs(layer, as_linear, RotaryLinearAttention | SoftmaxAttention)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Returns logits (B, num_classes) of tokens (B, N, C), or pooled features (B, head_width) if `pre_logits`."""
        return super().forward_head(self.final_proj(x), pre_logits)

    def prune_intermediate_layers(
        self, indices: int | list[int] | None = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drops the modules that are not needed for features at `indices`; see `Backbone.prune_intermediate_layers`."""
        if prune_head:
            self.final_proj = nn.Sequential()
            self.head_hidden_size = self.num_features
        return super().prune_intermediate_layers(indices, prune_norm, prune_head)


def as_linear(conv: nn.Conv2d) -> None:
    """Sets the reference's initial values of a convolution, which are those of linear layers."""
    trunc_normal_(conv.weight, std=0.02)


class ConvMlp(nn.Module):
    """`fc2(conv(GELU(fc1 x)))` with `conv(h) = h + ` a depthwise convolution of h; (B, N, C) -> (B, N, C).

    `last_act` adds another GELU after the convolution (ViT^3).
    """

    def __init__(self, dim: int, hidden: int, last_act: bool = False) -> None:
        super().__init__()
        self.fc1 = Linear(dim, hidden)
        self.act = nn.GELU()
        self.conv = ResidualConv(hidden)
        self.last_act = nn.GELU() if last_act else nn.Identity()
        self.fc2 = Linear(hidden, dim)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """(B, N, C) -> (B, N, C)."""
        return self.fc2(self.last_act(self.conv(self.act(self.fc1(x)), grid)))  # type: ignore[no-any-return]


MALA = ("mala", "mala", SOFTMAX, SOFTMAX)
NALA = ("nala", "nala", NALA_SOFTMAX, NALA_SOFTMAX)
POLA_PP = ("pola_pp", "pola_pp", SOFTMAX, SOFTMAX)

ravlt_t = preset(RAVLT)
ravlt_s = preset(RAVLT, embed_dims=(64, 128, 320, 512), depths=(3, 5, 9, 3), num_heads=(1, 2, 5, 8))
ravlt_b = preset(
    RAVLT,
    embed_dims=(96, 192, 384, 512),
    depths=(4, 6, 12, 6),
    num_heads=(1, 2, 6, 8),
    layer_scale=(1, 1, 1e-6, 1e-6),
)
ravlt_l = preset(
    RAVLT,
    embed_dims=(96, 192, 448, 640),
    depths=(4, 7, 19, 8),
    num_heads=(1, 2, 7, 10),
    layer_scale=(1e-6, 1e-6, 1e-6, 1e-6),
)

mavit_t = preset(ravlt_t, attention=MALA, head_width=2048)
mavit_s = preset(ravlt_s, attention=MALA, head_width=2048)
mavit_b = preset(ravlt_b, attention=MALA, head_width=2048)
mavit_l = preset(ravlt_l, attention=MALA, head_width=2560)

_nalaformer = partial(RAVLT, attention=NALA, second_cpe=True, torch_init=True)
nalaformer_xt = preset(_nalaformer, embed_dims=(32, 64, 128, 384), depths=(2, 2, 2, 2), num_heads=(1, 2, 4, 12))
nalaformer_t = preset(_nalaformer, mlp_ratio=4.0)
nalaformer_s = preset(_nalaformer, **ravlt_s.keywords)
nalaformer_b = preset(_nalaformer, **ravlt_b.keywords, mlp_ratio=4.0)
nalaformer_l = preset(_nalaformer, **ravlt_l.keywords)

_pola_pp = partial(RAVLT, attention=POLA_PP, head_width=2048, torch_init=True)
pola_pp_b0 = preset(_pola_pp, embed_dims=(32, 64, 128, 384), depths=(2, 2, 2, 2), num_heads=(1, 2, 4, 12))
pola_pp_b1 = preset(_pola_pp, embed_dims=(32, 64, 192, 384), depths=(2, 2, 4, 2), num_heads=(1, 2, 6, 12))
pola_pp_b2 = preset(_pola_pp)
pola_pp_b3 = preset(_pola_pp, **ravlt_s.keywords)
pola_pp_b4 = preset(_pola_pp, **ravlt_b.keywords)
pola_pp_b5 = preset(_pola_pp, **{**ravlt_l.keywords, "head_width": 2560})
