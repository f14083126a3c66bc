"""CSWin's cross-shaped stripe attention, with any mechanism inside the stripes.

Paper: Dong et al. 2022, "CSWin Transformer: A General Vision Transformer Backbone with Cross-Shaped Windows", Sec. 3.2
(stripes) and 3.3 (LePE).
"""

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.base import Attention, Grid
from linvit.attention.ops.functional import SizeOf
from linvit.errors import UserError, check_number
from linvit.layers.attention_layer import NOT_KEPT
from linvit.layers.hosting import AttentionHost, QKNorm, attend, qk_norms, queries_keys_values
from linvit.registry import Spec, attentions


class Stripes(NamedTuple):
    """How a plane is cut: padded by zeros to whole stripes, one half (rounded down) before it and the rest after it."""

    plane: tuple[int, int]
    stripe: tuple[int, int]

    @property
    def padding(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Rows of padding above and below, columns at the left and at the right."""
        rows, columns = (-side % part for side, part in zip(self.plane, self.stripe, strict=True))
        return (rows // 2, rows - rows // 2), (columns // 2, columns - columns // 2)

    def cut(self, x: Tensor) -> Tensor:
        """Cuts tokens (B, H * W, C) of the plane into those of each stripe, (B * stripes, H' * W', C)."""
        rows, columns = self.padding
        x = x.unflatten(1, self.plane)  # (B, H, W, C)
        if any(rows + columns):
            x = F.pad(x, (0, 0, *columns, *rows))
        height, width = self.stripe
        x = x.unflatten(2, (-1, width)).unflatten(1, (-1, height))  # (B, down, H', across, W', C)
        return x.transpose(2, 3).flatten(3, 4).flatten(0, 2)

    def join(self, x: Tensor) -> Tensor:
        """Joins stripes (B * stripes, H' * W', C) to the plane (B, H * W, C) and removes the padding."""
        (above, below), (left, right) = self.padding
        (height, width), (rows, columns) = self.plane, self.stripe
        down, across = (above + height + below) // rows, (left + width + right) // columns
        x = x.unflatten(1, self.stripe).unflatten(0, (-1, down, across))  # (B, down, across, H', W', C)
        x = x.transpose(2, 3).flatten(3, 4).flatten(1, 2)  # (B, padded H, padded W, C)
        return x[:, above : above + height, left : left + width].flatten(1, 2)


class StripeBranch(nn.Module):
    """One mechanism in each of the parallel stripes of a plane, plus LePE: a convolution of the values.

    LePE, the locally enhanced positional encoding, is a depthwise 3 x 3 convolution inside each stripe. Where the
    mechanism widens its output it has as many filters per channel. A stripe is (H', W'), of which None is the plane's.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        stripe: tuple[int | None, int | None],
        *,
        attention: Spec,
        key_dim: int | None = None,
        qk_norm: QKNorm = "none",
    ) -> None:
        super().__init__()
        self.stripe = stripe
        host = {} if key_dim is None else {"key_dim": key_dim}
        nominal = grid._replace(size=self.stripes(grid.size).stripe)
        self.mechanism: Attention = attentions.create(attention, dim=dim, num_heads=num_heads, grid=nominal, **host)
        width, out_dim = self.mechanism.dim, self.mechanism.out_dim
        self.lepe = nn.Conv2d(width, out_dim, 3, padding=1, groups=math.gcd(width, out_dim))
        self.q_norm, self.k_norm = qk_norms(qk_norm, self.mechanism)

    def size_in_checkpoint(self, count: int, size_of: SizeOf) -> tuple[int, int] | None:
        """The stripe of so many tokens in a checkpoint: as wide as this one, of another length."""
        match self.stripe:
            case None, int(width) if count % width == 0:
                return count // width, width
            case int(height), None if count % height == 0:
                return height, count // height
            case None, None:
                return size_of(count)
        return None

    def stripes(self, size: tuple[int, int]) -> Stripes:
        """Returns how a plane of this size is cut."""
        return Stripes(size, (self.stripe[0] or size[0], self.stripe[1] or size[1]))

    def layout(self, size: tuple[int, int]) -> Tensor:
        """Returns which patch of a plane (H, W) is at each place of each stripe, (stripes, H' W'); -1 for padding."""
        patches = torch.arange(1, size[0] * size[1] + 1).view(1, -1, 1)
        return self.stripes(size).cut(patches).squeeze(-1) - 1

    def forward(self, projected: list[Tensor], x: Tensor, grid: Grid) -> Tensor:
        """Returns the branch's output (B, N, out_dim)."""
        stripes = self.stripes(grid.size)
        inside = Grid(stripes.stripe)
        if self.mechanism.takes_input or self.mechanism.projections in ("kv", "qk"):
            x = stripes.cut(x)
        parts = [stripes.cut(part) for part in projected]
        q, k, v = queries_keys_values(self.mechanism, parts, x, (self.q_norm, self.k_norm))
        out = attend(self.mechanism, q, k, v, inside, x=x)
        return stripes.join(out + inside.map_patches(self.lepe, v))


class StripeAttention(AttentionHost):
    """Cross-shaped stripe attention, (B, N, C) -> (B, N, C).

    The first half of the channels and heads attends in vertical stripes H x w, the second in horizontal stripes w x W;
    their lengths follow the plane of the call. A plane that w (`width`) does not divide is padded, after the
    projection, with tokens whose q, k and v (and x) are 0 and which take part in the attention, as in CSWin's dense
    models. Each half has a mechanism of its own. A stripe as wide as the nominal plane, or a width of None, leaves one
    branch with all channels and heads, global on the plane of every call.
    """

    exports_any_size = False  # the map decides the padding of stripes

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        width: int | None,
        *,
        attention: Spec = "softmax",
        key_dim: int | None = None,
        qkv_bias: bool = True,
        proj_drop: float = 0.0,
        qk_norm: QKNorm = "none",
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in NOT_KEPT}
        super().__init__()
        self.like: partial[Any] = partial(StripeAttention, **arguments)
        check_number("proj_drop", proj_drop, at_least=0, at_most=1)
        if width is not None and width < 1:
            raise UserError(f"the width of a stripe must be at least 1, or None for the whole plane; got {width}")
        if grid.num_prefix:
            raise UserError(f"stripes have no place for prefix tokens; got num_prefix={grid.num_prefix}, use 0")
        shapes: list[tuple[int | None, int | None]] = [(None, width), (width, None)]
        if width is None or width >= max(grid.size):
            shapes = [(None, None)]
        count = len(shapes)
        if num_heads % count or dim % count:
            raise UserError(
                f"vertical and horizontal stripes share heads and channels equally, so both are even; got {num_heads} "
                f"heads and {dim} channels. Change them, or let one stripe cover the plane (width None)"
            )
        for name in ("stem", "qkv"):
            self.register_module(name, None)  # parameters of these come first
        self.branches = nn.ModuleList(
            StripeBranch(
                *(dim // count, num_heads // count, grid, shape), attention=attention, key_dim=key_dim, qk_norm=qk_norm
            )
            for shape in shapes
        )
        self.surround(self._mechanisms(), dim, bias=qkv_bias, proj_drop=proj_drop)

    def _mechanisms(self) -> list[Attention]:
        return [branch.mechanism for branch in self.branches]  # type: ignore[misc]

    def forward(self, x: Tensor, grid: Grid, before_norm: Tensor | None = None) -> Tensor:
        """(B, N, C) -> (B, N, C); a mechanism that takes the layer's input gets `before_norm` in its place."""
        count = len(self.branches)
        stemmed = x if self.stem is None else self.stem(x, grid)
        projected = self.qkv(stemmed).split(self.widths, dim=-1)
        parts = [list(projected[i::count]) for i in range(count)]  # of each branch
        given = stemmed if before_norm is None or not self._mechanisms()[0].takes_input else before_norm
        mixed = [
            branch(own, part, grid)
            for branch, own, part in zip(self.branches, parts, given.chunk(count, dim=-1), strict=True)
        ]
        return self.project(torch.cat(mixed, dim=-1), x)
