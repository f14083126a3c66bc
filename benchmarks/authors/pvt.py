"""FLatten-PVT and FLatten-DeiT."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from authors.focused import Focused
from authors.layers import Block, Patches, positions


class FlattenPVT(nn.Module):
    """FLatten-PVT as published: focused attention everywhere, no spatial reduction."""

    def __init__(
        self,
        size: tuple[int, int] = (224, 224),
        classes: int = 1000,
        dims: Sequence[int] = (64, 128, 320, 512),
        depths: Sequence[int] = (2, 2, 2, 2),
        heads: Sequence[int] = (1, 2, 5, 8),
        ratios: Sequence[int] = (8, 8, 4, 4),
    ) -> None:
        super().__init__()
        self.grids = [(size[0] // 2 ** (i + 2), size[1] // 2 ** (i + 2)) for i in range(4)]
        channels = [3, *dims]
        for i, (dim, grid) in enumerate(zip(dims, self.grids, strict=True)):
            attention = [Focused(dim, grid, heads[i], pvt=True) for _ in range(depths[i])]
            setattr(self, f"patch_embed{i + 1}", Patches(channels[i], dim, 2 if i else 4))
            setattr(self, f"pos_embed{i + 1}", nn.Parameter(0.02 * torch.randn(1, math.prod(grid), dim)))
            setattr(self, f"block{i + 1}", nn.Sequential(*(Block(dim, attn, dim * ratios[i]) for attn in attention)))
        self.norm, self.head = nn.LayerNorm(dims[-1], 1e-6), nn.Linear(dims[-1], classes)  # the norm is not applied

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, classes)."""
        for i, grid in enumerate(self.grids):
            tokens = getattr(self, f"patch_embed{i + 1}")(x)
            table = getattr(self, f"pos_embed{i + 1}")
            tokens = getattr(self, f"block{i + 1}")(tokens + (positions(table, grid, grid) if i else table))
            x = tokens.view(len(tokens), *grid, -1).permute(0, 3, 1, 2).contiguous()
        logits: Tensor = self.head(tokens.mean(1))
        return logits


class FlattenDeiT(nn.Module):
    """FLatten-DeiT: no class token, mean of the tokens."""

    def __init__(
        self, size: tuple[int, int] = (224, 224), classes: int = 1000, dim: int = 192, depth: int = 12, heads: int = 3
    ):
        super().__init__()
        grid = size[0] // 16, size[1] // 16
        self.patch_embed = Patches(3, dim, 16, norm=False)
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, math.prod(grid), dim))
        self.blocks = nn.Sequential(*(Block(dim, Focused(dim, grid, heads), 4 * dim) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(dim, 1e-6), nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, classes)."""
        logits: Tensor = self.head(self.norm(self.blocks(self.patch_embed(x) + self.pos_embed)).mean(1))
        return logits
