"""Swin: a pyramid of attention inside shifted windows, with any attention in its blocks.

Paper: Liu et al. 2021, "Swin Transformer: Hierarchical Vision Transformer using Shifted Windows". The FLatten presets
follow Han et al. 2023: focused attention over the whole map in stages 1 and 2, softmax in windows in stages 3 and 4. So
do the PolaFormer presets of Meng et al. 2025, and the Agent and InLine presets of Han et al. 2024, the latter two also
in all of stage 3 (tiny) or its first two blocks (base).

Parameters and numbers are those of the reference codes; the patch merging that ends a stage there begins the next one
here, as in timm. Published with `drop_path_rate` 0.2 (tiny), 0.3 (small) and 0.5 (base).
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.base import Grid
from linvit.backbones.base import Backbone, check_stages
from linvit.backbones.stage import Stage, pyramid_info, specs_and_rates, stage_grids
from linvit.errors import UserError
from linvit.image_size import image_size
from linvit.layers.block import Block
from linvit.layers.hosting import QKNorm
from linvit.layers.mlp import FeedForward, feed_forward
from linvit.layers.patch_embed import PatchEmbed
from linvit.layers.windows import WindowAttention
from linvit.registry import Spec, preset


class Swin(Backbone):
    """Swin: stages of strides 4, 8, 16, 32; windows in every block, shifted in every second one.

    For images of any size and aspect ratio: an image is zero-padded on the right and at the bottom to whole patches,
    maps of odd sides to whole 2 x 2 patches, and in each block to whole windows. `WindowAttention` describes maps
    smaller than the window.

    Args:
        img_size: Side, or (H, W), for windows and tables of fixed length.
        patch_size: Stride of stage 1.
        embed_dim: Channels C of stage 1; each further stage doubles them.
        window_size: Side of the windows, one for all or a list with one per stage or per block. None (null) is the
            whole map of any size, for mechanisms whose cost is linear.
        window_dilation: Distance of a window's tokens in rows and columns, for all stages or as a list; see
            `WindowAttention`.
        rel_pos_bias: Add a learnable bias of relative positions in every block whose attention accepts one (softmax).
        norm_eps: Epsilon of all LayerNorms.
    """

    dense: ClassVar[Mapping[str, Any]] = {"feature_norms": True}

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        img_size: int | Sequence[int] = 224,
        attention: Spec | Sequence[Spec] = "softmax",
        drop_path_rate: float = 0.0,
        patch_size: int = 4,
        embed_dim: int = 96,
        depths: Sequence[int] = (2, 2, 6, 2),
        num_heads: Sequence[int] = (3, 6, 12, 24),
        window_size: int | Sequence[int | None] | None = 7,
        window_dilation: int | Sequence[int] = 1,
        mlp_ratio: float = 4.0,
        ffn: FeedForward = "mlp",
        qkv_bias: bool = True,
        proj_drop: float = 0.0,
        qk_norm: QKNorm = "none",
        rel_pos_bias: bool = True,
        norm_eps: float = 1e-5,
        feature_norms: bool = False,
    ) -> None:
        check_stages(len(depths), num_heads=num_heads)
        dims = [embed_dim * 2**i for i in range(len(depths))]
        super().__init__(num_classes, dims[-1])
        specs, rates = specs_and_rates(attention, drop_path_rate, depths)
        windows = window_sizes(window_size, depths)
        dilations = [window_dilation] * len(depths) if isinstance(window_dilation, int) else window_dilation
        check_stages(len(depths), window_dilation=dilations)

        shared: dict[str, Any] = {"qkv_bias": qkv_bias, "proj_drop": proj_drop, "qk_norm": qk_norm}
        shared["rel_pos_bias"] = rel_pos_bias

        self.stages = nn.ModuleList()
        for i, size in enumerate(stage_grids(image_size(img_size), [patch_size] + [2] * (len(depths) - 1))):
            dim, grid = dims[i], Grid(size)
            blocks = [
                Block(
                    dim,
                    WindowAttention(
                        dim,
                        num_heads[i],
                        grid,
                        window=windows[i][j],
                        shifted=j % 2 == 1,
                        dilation=dilations[i],
                        attention=spec,
                        **shared,
                    ),
                    feed_forward(ffn, dim, int(dim * mlp_ratio)),
                    rate,
                    norm_eps,
                )
                for j, (spec, rate) in enumerate(zip(specs[i], rates[i], strict=True))
            ]
            embed = (
                PatchMerging(dims[i - 1], norm_eps)
                if i
                else PatchEmbed(in_chans, dim, patch_size, patch_size, norm_eps=norm_eps)
            )
            self.stages.append(Stage(dim, grid, embed, blocks))
        self.feature_norms = nn.ModuleList(nn.LayerNorm(dim, norm_eps) for dim in dims[:-1] if feature_norms)
        self.finalize(nn.LayerNorm(dims[-1], norm_eps), pyramid_info(dims, patch_size))


class PatchMerging(nn.Module):
    """Joins 2 x 2 patches: (B, C, H, W) -> LayerNorm of 4 C channels -> tokens (B, N, 2 C) and their patch grid.

    Odd sides are zero-padded on the right and at the bottom.
    """

    def __init__(self, dim: int, norm_eps: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * dim, norm_eps)
        self.proj = nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Returns tokens and their patch grid."""
        height, width = x.shape[-2:]
        if height % 2 or width % 2:
            x = F.pad(x, (0, width % 2, 0, height % 2))
        parts = x.unflatten(3, (-1, 2)).unflatten(2, (-1, 2))  # (B, C, H', 2, W', 2)
        size = parts.shape[2], parts.shape[4]
        merged = parts.permute(0, 2, 4, 5, 3, 1).flatten(3).flatten(1, 2)  # channels: column, row, C
        return self.proj(self.norm(merged)), size


def window_sizes(given: int | Sequence[int | None] | None, depths: Sequence[int]) -> list[list[int | None]]:
    """Returns the window size of each block of each stage, given one for all, one per stage, or one per block."""
    sides = [given] * len(depths) if given is None or isinstance(given, int) else list(given)
    if len(sides) == len(depths):
        sides = [side for side, depth in zip(sides, depths, strict=True) for _ in range(depth)]
    if len(sides) != sum(depths):
        raise UserError(
            f"window_size lists {len(sides)} sides for {sum(depths)} blocks in {len(depths)} stages. Give one for all, "
            f"{len(depths)} of them (one per stage), or {sum(depths)} (one per block); null is the whole map"
        )
    rest = iter(sides)
    return [list(islice(rest, depth)) for depth in depths]


swin_tiny = preset(Swin, embed_dim=96, depths=(2, 2, 6, 2), num_heads=(3, 6, 12, 24))
swin_small = preset(Swin, embed_dim=96, depths=(2, 2, 18, 2), num_heads=(3, 6, 12, 24))
swin_base = preset(Swin, embed_dim=128, depths=(2, 2, 18, 2), num_heads=(4, 8, 16, 32))
swin_tiny_384 = preset(swin_tiny, img_size=384, window_size=12)
swin_small_384 = preset(swin_small, img_size=384, window_size=12)
swin_base_384 = preset(swin_base, img_size=384, window_size=12)

_focused = ("focused", "focused", "softmax", "softmax")
flatten_swin_tiny = preset(swin_tiny, attention=_focused, window_size=(None, None, 7, 7))
flatten_swin_small = preset(swin_small, attention=_focused, window_size=(None, None, 7, 7))
flatten_swin_base = preset(swin_base, attention=_focused, window_size=(None, None, 7, 7))
flatten_swin_base_384 = preset(flatten_swin_base, img_size=384, window_size=(None, None, 12, 12))

_agents = tuple({"name": "agent", "agents": agents} for agents in (9, 16, 49))
_base_agents = (*[_agents[0]] * 2, *[_agents[1]] * 2, *[_agents[2]] * 2, *["softmax"] * 18)
_base_windows = (*[None] * 6, *[7] * 18)
agent_swin_tiny = preset(swin_tiny, attention=(*_agents, "softmax"), window_size=(None, None, None, 7))
agent_swin_small = preset(swin_small, attention=(*_agents[:2], "softmax", "softmax"), window_size=(None, None, 7, 7))
agent_swin_small_288 = preset(agent_swin_small, img_size=288, window_size=(None, None, 9, 9))
agent_swin_base = preset(swin_base, attention=_base_agents, window_size=_base_windows)
agent_swin_base_384 = preset(agent_swin_base, img_size=384, window_size=(*[None] * 6, *[12] * 18))

inline_swin_tiny = preset(swin_tiny, attention=(*["inline"] * 3, "softmax"), window_size=(None, None, None, 7))
inline_swin_small = preset(swin_small, attention=(*["inline"] * 2, *["softmax"] * 2), window_size=(None, None, 7, 7))
inline_swin_base = preset(swin_base, attention=(*["inline"] * 6, *["softmax"] * 18), window_size=_base_windows)

_pola = ("pola", "pola", "softmax", "softmax")
pola_swin_tiny = preset(swin_tiny, attention=_pola, window_size=(None, None, 7, 7))
pola_swin_small = preset(swin_small, attention=_pola, window_size=(None, None, 7, 7))
pola_swin_base = preset(swin_base, attention=_pola, window_size=(None, None, 7, 7))
