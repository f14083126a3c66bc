"""Spatial reduction of keys and values: fewer patch tokens; prefix tokens are kept."""

import torch
from torch import Tensor, nn

from linvit.attention.base import Attention, Grid
from linvit.attention.ops.functional import pooled
from linvit.errors import UserError
from linvit.registry import Spec, attentions


class StridedReduction(nn.Module):
    """PVT's spatial-reduction attention (Wang et al. 2021, Eq. 3): an R x R convolution of stride R, then LayerNorm."""

    def __init__(self, dim: int, ratio: int) -> None:
        super().__init__()
        self.ratio = ratio
        self.conv = nn.Conv2d(dim, dim, kernel_size=ratio, stride=ratio)
        self.norm = nn.LayerNorm(dim)

    def reduced(self, size: tuple[int, int]) -> tuple[int, int]:
        """Returns the patch grid after the reduction."""
        if min(size) < self.ratio:
            raise UserError(f"sr_ratio {self.ratio} leaves nothing of a grid of {size[0]}x{size[1]}; lower it")
        return size[0] // self.ratio, size[1] // self.ratio

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """(B, N, C) -> (B, M, C)."""
        return self.norm(grid.map_patches(self.conv, x))  # type: ignore[no-any-return]


class PooledReduction(nn.Module):
    """PVTv2's linear reduction (Wang et al. 2022, Sec. 3.2): pool to P x P, 1x1 convolution, LayerNorm, GELU."""

    def __init__(self, dim: int, pool: int) -> None:
        super().__init__()
        self.size = (pool, pool)
        self.conv = nn.Conv2d(dim, dim, kernel_size=1)
        self.norm = nn.LayerNorm(dim)
        self.act = nn.GELU()

    def reduced(self, size: tuple[int, int]) -> tuple[int, int]:
        """Returns the patch grid after the reduction."""
        return self.size

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """(B, N, C) -> (B, M, C)."""
        reduced = grid.map_patches(lambda plane: self.conv(pooled(plane, self.size[0])), x)
        return self.act(self.norm(reduced))  # type: ignore[no-any-return]


def reducible(mechanism: Attention) -> bool:
    """Returns True if a mechanism's keys and values may come from fewer tokens than its queries."""
    return not mechanism.facts.same_grid and mechanism.host.project == "qkv"


def reducible_spec(spec: Spec, dim: int, num_heads: int, grid: Grid) -> bool:
    """Builds the mechanism of a spec and returns `reducible` of it, without changing torch's random state."""
    with torch.random.fork_rng(devices=[]):
        return reducible(attentions.create(spec, dim=dim, num_heads=num_heads, grid=grid))
