"""SOFT and SOFT++: a pyramid of four stages, the first three softmax-free; the attention can be replaced.

Papers: Lu et al. 2021, "SOFT: Softmax-free Transformer with Linear Complexity"; Lu et al. 2024, "Softmax-free Linear
Transformers" (SOFT++, the `soft_norm` models).

The models equal the reference code, also where the papers do not describe it: stages 1 to 3 are post-norm,
with the tanh form of GELU, an MLP ratio of 4 and elementwise dropout instead of stochastic depth; stage 4 is
PVT's, pre-norm with softmax attention and a class token; position tables are those of 224 x 224 images for any
`img_size`. Sizes are the code's, not those of the later paper's Table 1, which match no published model.

SOFT-Small: code and README contradict each other. The code's depths 1-3-20-4, which linvit uses, make 38.9 million
parameters; the README says 24 million, which is 1-3-7-4 (24,110,092). For a checkpoint of those depths:
`{name: soft_small, depths: [1, 3, 7, 4]}`.
"""

from collections.abc import Sequence

from timm.layers import DropPath
from torch import Tensor, nn

from linvit.attention.base import Grid
from linvit.attention.ops.functional import SizeOf
from linvit.backbones.base import Backbone, check_stages
from linvit.backbones.stage import Stage, pyramid_info, specs_and_rates, stage_grids
from linvit.image_size import image_size
from linvit.layers.attention_layer import AttentionLayer
from linvit.layers.block import Block
from linvit.layers.hosting import QKNorm
from linvit.layers.mlp import Mlp
from linvit.layers.patch_embed import ConvEmbed
from linvit.registry import Spec, preset


def softmax_free(name: str) -> list[Spec]:
    """Returns the attention of the four stages in the papers: 49 landmarks each for a 224 x 224 image."""
    return [
        {"name": name, "ratio": 8, "conv_size": 9},
        {"name": name, "ratio": 4, "conv_size": 5},
        {"name": name, "ratio": 2, "conv_size": 3},
        "softmax",
    ]


SOFT_STAGES = softmax_free("soft")
SOFT_NORM_STAGES = softmax_free("soft_norm")


class SOFT(Backbone):
    """SOFT: four stages of strides 4, 8, 16, 32, for images of any size and aspect ratio; the last has the class token.

    For other image sizes than 224 the position embeddings are interpolated (bilinear); sides that are not a multiple of
    a stride are rounded up. A landmark represents equally many patches at any size, so larger images have more (49
    at 224 x 224, 256 at 512 x 512), and the cost of their inverse grows with the cube of their number.

    A spec in the list replaces only the attention of its stage or block: blocks of stages 1 to 3 stay
    post-norm. A single spec is for all four stages, including the class token of the last: a bare `soft` is soft
    attention there too, and its ratios and convolutions follow from `img_size` (8, 4, 2, 1 at 224).

    `soft_norm` differs from the reference in one respect: Newton's start is scaled per image and head, not by
    the largest row sum in the batch. The reference is `{name: soft_norm, ratio: 8, conv_size: 9, alpha_scope: batch}`
    in stage 1, and likewise with 4 and 5, 2 and 3 in stages 2 and 3.

    Args:
        img_size: Side, or (H, W), for attention with parameters of fixed length. The default
            attention has none, so its weights are the same for any `img_size`.
        drop_path_rate: Dropout of the last block; linear from 0 at the first. In stages 1 to 3 it drops single entries
            of a branch, in stage 4 whole branches.
        mlp_ratio: Hidden width of the MLPs of stage 4 over its channels; 4 in the other stages.
        stochastic_depth: Drop whole branches also in stages 1 to 3, unlike the reference.
        torch_init: Keep PyTorch's initial values of the blocks of stages 1 to 3, as the code of SOFT++ does.
    """

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        img_size: int | Sequence[int] = 224,
        attention: Spec | Sequence[Spec] = SOFT_STAGES,
        drop_path_rate: float = 0.0,
        embed_dims: Sequence[int] = (64, 128, 320, 512),
        num_heads: Sequence[int] = (2, 4, 10, 16),
        depths: Sequence[int] = (1, 2, 3, 2),
        mlp_ratio: float = 4.0,
        proj_drop: float = 0.0,
        qk_norm: QKNorm = "none",
        stochastic_depth: bool = False,
        torch_init: bool = False,
    ) -> None:
        check_stages(4, embed_dims=embed_dims, num_heads=num_heads, depths=depths)
        super().__init__(num_classes, embed_dims[-1], "token", num_prefix_tokens=1)
        specs, rates = specs_and_rates(attention, drop_path_rate, depths)
        tables, grids = stage_grids((224, 224)), stage_grids(image_size(img_size))

        stages = []
        for i, (dim, heads) in enumerate(zip(embed_dims, num_heads, strict=True)):
            last = i == 3
            grid = Grid(grids[i], num_prefix=int(last))
            blocks: list[nn.Module] = []
            for spec, rate in zip(specs[i], rates[i], strict=True):
                attn = AttentionLayer(dim, heads, grid, attention=spec, proj_drop=proj_drop, qk_norm=qk_norm)
                if last:
                    blocks.append(Block(dim, attn, Mlp(dim, int(dim * mlp_ratio)), rate, norm_eps=1e-6))
                else:
                    drop = DropPath(rate) if stochastic_depth else nn.Dropout(rate)
                    blocks.append(PostNormBlock(dim, attn, Mlp(dim, 4 * dim, tanh=True), drop))
            embed = ConvEmbed([embed_dims[i - 1], dim], [2]) if i else ConvEmbed([in_chans, 32, 32, dim], [2, 1, 2])
            stages.append(SOFTStage(dim, grid._replace(size=tables[i]), embed, blocks, positions=True))
        self.stages = nn.ModuleList(stages)
        self.torch_init = torch_init
        norm = nn.LayerNorm(embed_dims[-1], eps=1e-6)
        self.finalize(norm, pyramid_info(embed_dims), initialise=self.stages[3] if torch_init else None)

    def init_attention(self, name: str, layer: nn.Module) -> None:
        """With `torch_init`, initialises only the last stage; see `Backbone.init_attention`."""
        if not self.torch_init or name.startswith("stages.3."):
            super().init_attention(name, layer)

    def no_weight_decay(self) -> set[str]:
        """Returns names of parameters without weight decay: only the class token, as in the reference."""
        return {"stages.3.cls_token"} & dict(self.named_parameters()).keys()


class SOFTStage(Stage):
    """Stage whose positions are those of images of 224 x 224, in every model and every checkpoint."""

    def resize_tables(self, state: dict[str, Tensor], size_of: SizeOf) -> dict[str, Tensor]:
        """Returns the positions unchanged."""
        return state


class PostNormBlock(nn.Module):
    """`norm1(x + attn x)`, then `norm2(x + mlp x)`, each with dropout on the branch; (B, N, C) -> (B, N, C)."""

    def __init__(self, dim: int, attn: nn.Module, mlp: nn.Module, drop: nn.Module) -> None:
        super().__init__()
        self.attn = attn
        self.norm1 = nn.LayerNorm(dim)
        self.mlp = mlp
        self.norm2 = nn.LayerNorm(dim)
        self.drop = drop

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """(B, N, C) -> (B, N, C)."""
        x = self.norm1(x + self.drop(self.attn(x, grid)))
        return self.norm2(x + self.drop(self.mlp(x, grid)))  # type: ignore[no-any-return]


soft_tiny = preset(SOFT)
soft_small = preset(SOFT, depths=(1, 3, 20, 4))
soft_medium = preset(SOFT, embed_dims=(64, 128, 288, 512), num_heads=(2, 4, 9, 16), depths=(1, 3, 29, 5))
soft_large = preset(SOFT, depths=(1, 3, 40, 5))
soft_huge = preset(SOFT, embed_dims=(64, 128, 352, 512), num_heads=(2, 4, 11, 16), depths=(1, 5, 49, 5))

soft_norm_tiny = preset(soft_tiny, attention=SOFT_NORM_STAGES, torch_init=True)
soft_norm_small = preset(soft_small, attention=SOFT_NORM_STAGES, torch_init=True)
soft_norm_medium = preset(soft_medium, attention=SOFT_NORM_STAGES, torch_init=True)
soft_norm_large = preset(soft_large, attention=SOFT_NORM_STAGES, torch_init=True)
soft_norm_huge = preset(soft_huge, attention=SOFT_NORM_STAGES, torch_init=True)
