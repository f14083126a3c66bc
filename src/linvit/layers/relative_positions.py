"""Relative position bias: a learnable number per head for every offset between two patches.

Paper: Liu et al. 2021, "Swin Transformer: Hierarchical Vision Transformer using Shifted Windows", Eq. 4. Decomposed
positions, which depend on the query: Li et al. 2022, "MViTv2", Eq. 4, as in ViTDet.
"""

import math

import torch
from timm.layers import trunc_normal_
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.ops.functional import SizeOf, resize_table, resize_tokens


def position_table(size: tuple[int, int], num_heads: int) -> nn.Parameter:
    """Builds a table ((2 H - 1) (2 W - 1), h) for a plane (H, W), with Swin's initial values."""
    table = nn.Parameter(torch.zeros((2 * size[0] - 1) * (2 * size[1] - 1), num_heads))
    trunc_normal_(table, std=0.02)
    return table


def relative_position_bias(table: Tensor, nominal: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """Returns the bias (h, N, M) between all patches of a plane, from a table of relative positions, query less key.

    The table ((2 H - 1) (2 W - 1), h) of another, nominal plane is resized (bicubic), as the official fine-tuning does.
    """
    height, width = size
    span = 2 * height - 1, 2 * width - 1
    table = resize_tokens(table[None], (2 * nominal[0] - 1, 2 * nominal[1] - 1), span)[0]
    rows, columns = (torch.arange(side, device=table.device) for side in size)
    down = (rows[:, None] - rows + height - 1)[:, None, :, None]  # (H, 1, H, 1)
    right = (columns[:, None] - columns + width - 1)[:, None]  # (W, 1, W)
    return table.mT[:, (down * span[1] + right).view(height * width, height * width)]


def resize_position_table(given: Tensor, own: Tensor, size: tuple[int, int], size_of: SizeOf) -> Tensor:
    """Returns the table of a checkpoint resized (bicubic) for a plane (H, W); the table itself if it does not fit."""

    def span_of(count: int) -> tuple[int, int] | None:
        for down in range(1, count + 1, 2):
            across, rest = divmod(count, down)
            plane = (down + 1) // 2, (across + 1) // 2
            if not rest and across % 2 and size_of(math.prod(plane)) == plane:
                return down, across
        return None

    span = 2 * size[0] - 1, 2 * size[1] - 1
    return resize_table(given, own, span, span_of) if len(own) == math.prod(span) else given


class DecomposedPositions(nn.Module):
    """Vectors for every distance in rows and in columns, whose products with a query are added to its logits.

    Tables (2 H - 1, d) and (2 W - 1, d) of a plane (H, W), initially zero, are resized (linear) for another plane.
    """

    def __init__(self, size: tuple[int, int], head_dim: int) -> None:
        super().__init__()
        self.h, self.w = (nn.Parameter(torch.zeros(2 * side - 1, head_dim)) for side in size)

    def forward(self, q: Tensor, num_heads: int, size: tuple[int, int]) -> Tensor:
        """Returns the bias (B, h, N, N) of queries (B, N, h d) or (B, N, h, d), all patches of a plane (H, W)."""
        q = q.reshape(q.shape[0], *size, num_heads, math.prod(q.shape[2:]) // num_heads)  # (B, H, W, h, d)
        rows = torch.einsum("byxhd,yrd->bhyxr", q, between(self.h, size[0]))
        columns = torch.einsum("byxhd,xcd->bhyxc", q, between(self.w, size[1]))
        return (rows[..., :, None] + columns[..., None, :]).flatten(4).flatten(2, 3)

    def resize_tables(self, state: dict[str, Tensor], size_of: SizeOf) -> dict[str, Tensor]:
        """Returns the tables of a checkpoint for the nominal plane (linear); see `Attention.resize_tables`."""
        return {name: resized_line(table, len(getattr(self, name))) for name, table in state.items() if name in "hw"}


def resized_line(table: Tensor, length: int) -> Tensor:
    """Resizes a table (L, d) to (length, d) by linear interpolation."""
    return table if len(table) == length else F.interpolate(table.T[None], length, mode="linear")[0].T


def between(table: Tensor, side: int) -> Tensor:
    """Returns the entries (n, n, d) of a table of distances for each pair of n positions in a line, query first."""
    places = torch.arange(side, device=table.device)
    return resized_line(table, 2 * side - 1)[places[:, None] - places + side - 1]
