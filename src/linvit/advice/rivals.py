"""Rivals of another attention: softmax in windows, a smaller model of the same family."""

import math
import re

import timm
import torch
from torch import Tensor
from torch.nn import functional as F

from linvit.attention.base import Attention, Grid
from linvit.attention.declarations import Facts
from linvit.layers.windows import Windows

SIZES = ("nano", "micro", "tiny", "small", "medium", "base", "large", "huge", "giant", "gigantic")
"""Words for sizes in timm's names, in their order."""


class WindowedSoftmax(Attention):
    """Softmax attention in windows of at most `side` x `side` patches, all of one size. Prefix tokens see all tokens.

    The patches of a window see the prefix and one another. A map is cut into as few windows as possible, whose sides
    leave least to be padded by zeros. In blocks between global ones it is the attention of ViTDet.

    Paper: Li et al. 2022, "Exploring Plain Vision Transformer Backbones for Object Detection", Section 3.

    Args:
        side: Largest side of a window.
    """

    facts = Facts(complexity="O(N)", same_grid=True, linear_in_values=False, no_matrix="it is a rival in time alone")
    precision = "inherit"
    recompute = False

    def __init__(self, dim: int, num_heads: int, grid: Grid, *, key_dim: int | None = None, side: int = 14) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        self.side = side

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """(B, h, N, dk), (B, h, N, dk), (B, h, N, d) -> (B, h, N, d)."""
        height, width = (math.ceil(side / math.ceil(side / self.side)) for side in grid.size)
        windows, prefix = Windows(grid.size, (height, width)), grid.num_prefix
        count, heads = math.prod(windows.counts), q.shape[:2]

        def cut(x: Tensor) -> Tensor:
            parts: Tensor = windows.partition(x[:, :, prefix:].flatten(0, 1))  # (B h n, s s, d)
            found: Tensor = parts.unflatten(0, (*heads, count))
            return found  # (B, h, n, s s, d)

        def joined(x: Tensor) -> Tensor:
            front = x[:, :, None, :prefix].expand(-1, -1, count, -1, -1)
            return torch.cat([front, cut(x)], 3) if prefix else cut(x)

        out = F.scaled_dot_product_attention(cut(q), joined(k), joined(v))
        patches: Tensor = windows.reverse(out.flatten(0, 2)).unflatten(0, heads)
        if not prefix:
            return patches
        return torch.cat([F.scaled_dot_product_attention(q[:, :, :prefix], k, v), patches], 2)


def windowed(blocks: int, global_blocks: int = 4) -> list[object]:
    """Specs for blocks in windows, None for the global ones, which are evenly spaced and end with the last."""
    kept = {round((i + 1) * blocks / global_blocks) - 1 for i in range(global_blocks)}
    return [None if block in kept else "linvit.advice.rivals:WindowedSoftmax" for block in range(blocks)]


def smaller(name: str) -> str | None:
    """Returns timm's next smaller model of the same family by its name; None if timm has none."""
    for i, size in enumerate(SIZES):
        if re.search(rf"(?<![a-z]){size}(?![a-z])", name):
            others = [re.sub(rf"(?<![a-z]){size}(?![a-z])", one, name.partition(".")[0]) for one in SIZES[:i][::-1]]
            return next((one for one in others if timm.is_model(one)), None)
    found = re.search(r"_b([1-9])", name)
    other = name.replace(found[0], f"_b{int(found[1]) - 1}") if found else ""
    return other if timm.is_model(other) else None
