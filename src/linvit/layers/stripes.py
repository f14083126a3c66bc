"""CSWin's cross-shaped stripe attention, with any mechanism inside the stripes.

Paper: Dong et al. 2022, "CSWin Transformer: A General Vision Transformer Backbone with Cross-Shaped Windows", Sec. 3.2
(stripes) and 3.3 (LePE).
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from linvit.attention.base import Attention, Grid
from linvit.attention.ops.functional import SizeOf
from linvit.errors import UserError, check_number
from linvit.layers.attention_layer import NOT_KEPT
from linvit.layers.hosting import AttentionHost, QKNorm, attend, qk_norms, queries_keys_values
from linvit.layers.windows import Windows
from linvit.registry import Spec, attentions


class StripeBranch(nn.Module):
    """One mechanism in each of the parallel stripes of a plane, plus LePE: a convolution of the values.

    LePE, the locally enhanced positional encoding, is a depthwise 3 x 3 convolution inside each stripe. Where the
    mechanism widens its output it has as many filters per channel. A stripe is (H', W'); None means the plane's side.
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
        nominal = grid._replace(size=self.stripes(grid.size).window)
        self.mechanism: Attention = attentions.create(attention, dim=dim, num_heads=num_heads, grid=nominal, **host)
        width, out_dim = self.mechanism.dim, self.mechanism.out_dim
        self.lepe = nn.Conv2d(width, out_dim, 3, padding=1, groups=math.gcd(width, out_dim))
        self.q_norm, self.k_norm = qk_norms(qk_norm, self.mechanism)

    def size_in_checkpoint(self, count: int, size_of: SizeOf) -> tuple[int, int] | None:
        """Returns the stripe with this number of tokens in a checkpoint: as wide as this one, of another length."""
        match self.stripe:
            case None, int(width) if count % width == 0:
                return count // width, width
            case int(height), None if count % height == 0:
                return height, count // height
            case None, None:
                return size_of(count)
        return None

    def stripes(self, size: tuple[int, int]) -> Windows:
        """Returns the division of a plane of this size: zero-padded to whole stripes, half before and half after."""
        return Windows(size, (self.stripe[0] or size[0], self.stripe[1] or size[1]), centred=True)

    def layout(self, size: tuple[int, int]) -> Tensor:
        """Returns the patch of a plane (H, W) at each position of each stripe, (stripes, H' W'); -1 for padding."""
        patches = torch.arange(1, size[0] * size[1] + 1).view(1, -1, 1)
        return self.stripes(size).partition(patches).squeeze(-1) - 1

    def forward(self, projected: list[Tensor], x: Tensor, grid: Grid) -> Tensor:
        """Returns the branch's output (B, N, out_dim)."""
        stripes = self.stripes(grid.size)
        inside = Grid(stripes.window)
        if self.mechanism.host.input or self.mechanism.host.project in ("kv", "qk"):
            x = stripes.partition(x)
        parts = [stripes.partition(part) for part in projected]
        q, k, v = queries_keys_values(self.mechanism, parts, x, (self.q_norm, self.k_norm))
        out = attend(self.mechanism, q, k, v, inside, x=x)
        return stripes.reverse(out + inside.map_patches(self.lepe, v))


class StripeAttention(AttentionHost):
    """Cross-shaped stripe attention, (B, N, C) -> (B, N, C).

    The first half of the channels and heads attends in vertical stripes H x w, the second in horizontal stripes w x W;
    their lengths follow the plane of the call. A plane that is not divisible by w (`width`) is padded, after the
    projection, with tokens whose q, k and v (and x) are 0 and which take part in the attention, as in CSWin's dense
    models. Each half has its own mechanism. A stripe as wide as the nominal plane, or a width of None, gives one
    branch with all channels and heads, global on the plane of every call.
    """

    exports_any_size = False  # the padding of stripes depends on the map

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
            self.register_module(name, None)  # registered first, so that their parameters come first
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
        """Maps (B, N, C) to (B, N, C); a mechanism that takes the layer's input gets `before_norm` instead."""
        count = len(self.branches)
        stemmed = x if self.stem is None else self.stem(x, grid)
        projected = self.qkv(stemmed).split(self.widths, dim=-1)
        parts = [list(projected[i::count]) for i in range(count)]  # per branch
        given = stemmed if before_norm is None or not self._mechanisms()[0].host.input else before_norm
        mixed = [
            branch(own, part, grid)
            for branch, own, part in zip(self.branches, parts, given.chunk(count, dim=-1), strict=True)
        ]
        return self.project(torch.cat(mixed, dim=-1), x)
