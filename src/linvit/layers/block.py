"""Pre-norm transformer block of all families except SOFT, with optional convolutions for positions."""

from functools import partial
from typing import Any

import torch
from timm.layers import DropPath
from torch import Tensor, nn

from linvit.attention.base import Grid, Packed


class Block(nn.Module):
    """`x + attn(norm1 x)`, then `x + mlp(norm2 x)`, each under stochastic depth; (B, N, C) -> (B, N, C).

    Both are called with tokens and grid; with `input_before_norm`, attention also gets `before_norm=x`. `cpe` is the
    number of conditional positional encodings: one before attention, a second one before the MLP. `layer_scale` is the
    initial value of a learnable factor per channel on each branch. `norm_eps=None` disables the norms.
    """

    def __init__(
        self,
        dim: int,
        attn: nn.Module,
        mlp: nn.Module,
        drop_path: float,
        norm_eps: float | None,
        *,
        input_before_norm: bool = False,
        cpe: int = 0,
        layer_scale: float | None = None,
    ) -> None:
        super().__init__()
        self.input_before_norm = input_before_norm
        self.norm1 = nn.Identity() if norm_eps is None else nn.LayerNorm(dim, eps=norm_eps)
        self.attn = attn
        self.drop_path1 = DropPath(drop_path)
        self.norm2 = nn.Identity() if norm_eps is None else nn.LayerNorm(dim, eps=norm_eps)
        self.mlp = mlp
        self.drop_path2 = DropPath(drop_path)
        self.cpe1, self.cpe2 = (ResidualConv(dim) if cpe > i else None for i in range(2))
        scales = (nn.Identity() if layer_scale is None else LayerScale(dim, layer_scale) for _ in range(2))
        self.scale1, self.scale2 = scales

    def forward(self, x: Tensor, grid: Grid | Packed) -> Tensor:
        """(B, N, C) -> (B, N, C)."""
        x = x if self.cpe1 is None else self.cpe1(x, grid)
        extra = {"before_norm": x} if self.input_before_norm else {}
        drop1: Any = self.drop_path1
        drop2: Any = self.drop_path2
        if isinstance(grid, Packed):
            drop1, drop2 = (partial(drop_paths, drop, grid) for drop in (drop1, drop2))
        x = x + drop1(self.scale1(self.attn(self.norm1(x), grid, **extra)))
        x = x if self.cpe2 is None else self.cpe2(x, grid)
        return x + drop2(self.scale2(self.mlp(self.norm2(x), grid)))  # type: ignore[no-any-return]


def drop_paths(drop: DropPath, packed: Packed, branch: Tensor) -> Tensor:
    """Applies stochastic depth image by image to a branch (1, T, C) of packed images."""
    if not (drop.training and drop.drop_prob):
        return branch
    return branch * packed.spread(drop(branch.new_ones(len(packed.sizes), 1)))


class LayerScale(nn.Module):
    """Learnable factor per channel (Touvron et al. 2021, "Going deeper with Image Transformers", Sec. 2).

    Its shape is (1, C), not (C,) as in timm, because the references apply weight decay to it.
    """

    def __init__(self, dim: int, init: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(init * torch.ones(1, dim))

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, C) -> (B, N, C)."""
        return x * self.gamma


class ResidualConv(nn.Conv2d):
    """`x + conv(x)` with a 3 x 3 depthwise convolution of the patches, (B, N, C) -> (B, N, C); prefix tokens unchanged.

    Before attention it is the conditional positional encoding of Chu et al. 2021 ("Conditional Positional Encodings for
    Vision Transformers"): a patch's position follows from its neighbours and from the zeros around the image.
    """

    def __init__(self, dim: int) -> None:
        super().__init__(dim, dim, 3, padding=1, groups=dim)

    def forward(self, x: Tensor, grid: Grid | Packed) -> Tensor:  # type: ignore[override]  # tokens, not a plane
        """(B, N, C) -> (B, N, C)."""
        convolve = super().forward
        return grid.map_patches(lambda plane: plane + convolve(plane), x)
