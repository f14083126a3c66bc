"""Attention layer: projections around any mechanism, spatial reduction, gate, output projection, dropout."""

from functools import partial
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.base import Attention, Grid, Packed
from linvit.attention.ops.functional import SizeOf
from linvit.errors import UserError, check_number
from linvit.layers.hosting import AttentionHost, QKNorm, attend, qk_norms, queries_keys_values
from linvit.layers.relative_positions import (
    DecomposedPositions,
    position_table,
    relative_position_bias,
    resize_position_table,
)
from linvit.layers.spatial_reduction import PooledReduction, StridedReduction, reducible, reducible_spec
from linvit.registry import Spec, attentions

NOT_KEPT = ("self", "__class__", "attention")
"""Arguments that `like` does not copy."""


class AttentionLayer(AttentionHost):
    """Any registered mechanism as a layer on tokens, (B, N, C) -> (B, N, C).

    Args:
        dim: Channels C.
        num_heads: Heads h, unless the mechanism chooses its own.
        grid: Nominal grid of the layer's tokens (`kv_size` follows from `sr_ratio` or `sr_pool`).
        attention: Name or `{name: ..., option: value}`.
        key_dim: Channels of q and k per head; None means C / h.
        qkv_bias: Bias in the input projections and the gate.
        proj_bias: Bias in the output projection, unless the mechanism has a norm follow it (`bn2d`).
        proj_drop: Dropout after the output projection.
        qk_norm: Norm of queries and keys, for any mechanism: "none", "rms" or "l2"; see `QueryKeyNorm`. It keeps their
            products small in half precision.
        sr_ratio: PVT's spatial reduction: keys and values come from patches merged R x R by a strided convolution.
        sr_pool: PVTv2's linear reduction: keys and values come from patches pooled to P x P; 0 is off.
        sr_required: Raise an error for a mechanism that needs as many keys as queries; False disables the reduction.
        input_norm: LayerNorm of the input, after that of a block (MHLA).
        rel_pos_bias: Add a learnable bias of relative positions, for a mechanism that accepts a bias and whose keys are
            not reduced. Its table is made for the nominal grid and resized for others; prefix tokens have no bias.
            "decomposed" is ViTDet's, which depends on the query (`DecomposedPositions`).

    Attributes:
        like: Builds an equal layer with another mechanism: `layer.like(attention="hydra")`, with initial weights.

    Example:
        >>> layer = linvit.AttentionLayer(192, 3, linvit.Grid((14, 14)), attention="focused")
        >>> layer(torch.randn(2, 196, 192), linvit.Grid((14, 14))).shape
        torch.Size([2, 196, 192])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        attention: Spec = "softmax",
        key_dim: int | None = None,
        qkv_bias: bool = True,
        proj_bias: bool = True,
        proj_drop: float = 0.0,
        qk_norm: QKNorm = "none",
        sr_ratio: int = 1,
        sr_pool: int = 0,
        sr_required: bool = True,
        input_norm: bool = False,
        rel_pos_bias: bool | Literal["decomposed"] = False,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in NOT_KEPT}
        super().__init__()
        self.like: partial[Any] = partial(AttentionLayer, **arguments)
        check_number("proj_drop", proj_drop, at_least=0, at_most=1)
        if sr_ratio < 1 or sr_pool < 0:
            raise UserError(f"sr_ratio must be at least 1 and sr_pool at least 0; got {sr_ratio} and {sr_pool}")
        if sr_ratio > 1 and sr_pool:
            raise UserError(f"sr_ratio={sr_ratio} and sr_pool={sr_pool} exclude each other; set one of them")
        if (sr_ratio > 1 or sr_pool) and not sr_required and not reducible_spec(attention, dim, num_heads, grid):
            sr_ratio, sr_pool = 1, 0
        self.sr: StridedReduction | PooledReduction | None = None
        if sr_ratio > 1:
            self.sr = StridedReduction(dim, sr_ratio)
        elif sr_pool:
            self.sr = PooledReduction(dim, sr_pool)
        grid = self._reduced(grid)
        host = {} if key_dim is None else {"key_dim": key_dim}
        self.mechanism: Attention = attentions.create(attention, dim=dim, num_heads=num_heads, grid=grid, **host)

        self.input_norm = nn.LayerNorm(dim) if input_norm else None
        if self.sr is not None and not reducible(self.mechanism):
            same = self.mechanism.facts.same_grid
            tied = "declares same_grid" if same else f"projects '{self.mechanism.host.project}'"
            raise UserError(
                f"{type(self.mechanism).__name__} {tied}, so its keys or queries cannot be reduced; use sr_ratio=1 "
                f"and sr_pool=0 with it"
            )
        self.surround(
            [self.mechanism],
            dim,
            bias=qkv_bias,
            proj_bias=proj_bias,
            proj_drop=proj_drop,
            reduced=self.sr is not None,
        )
        self.q_norm, self.k_norm = qk_norms(qk_norm, self.mechanism)
        self.relative_position_bias_table: nn.Parameter | None = None
        self.rel_pos: DecomposedPositions | None = None
        if rel_pos_bias:
            if not self.mechanism.host.accepts_bias or self.sr is not None:
                raise UserError(
                    f"rel_pos_bias is for a mechanism that takes a bias, such as softmax, without spatial reduction; "
                    f"got {type(self.mechanism).__name__}, sr_ratio={sr_ratio} and sr_pool={sr_pool}. Leave it out here"
                )
            self.add_positions(rel_pos_bias, grid.size)

    def add_positions(self, kind: bool | Literal["decomposed"], size: tuple[int, int]) -> None:
        """Adds the tables of relative positions (`rel_pos_bias`) for a nominal plane."""
        if kind == "decomposed":
            self.rel_pos = DecomposedPositions(size, self.mechanism.key_dim)
        else:
            self.relative_position_bias_table = position_table(size, self.mechanism.num_heads)

    def forward(self, x: Tensor, grid: Grid | Packed, bias: Tensor | None = None) -> Tensor:
        """Maps (B, N, C) to (B, N, C) for the tokens of `grid`, prefix tokens first, then patches row by row.

        A position bias or mask (B or 1, h, N, M), for a mechanism that accepts one, is added to the layer's.
        Of `Packed` images the tokens are a row, (1, T, C).
        """
        if not isinstance(grid, Packed) and x.shape[1] != grid.num_prefix + grid.size[0] * grid.size[1]:
            raise UserError(
                f"got {x.shape[1]} tokens for a grid of {grid.size[0]}x{grid.size[1]} patches and {grid.num_prefix} "
                f"prefix tokens = {grid.num_queries}; pass the Grid that the tokens were made with"
            )
        if self.input_norm is not None:
            x = self.input_norm(x)
        stemmed = x if self.stem is None else self.stem(x, grid)
        return self.project(self.mix(stemmed, grid, bias), x)

    def mix(self, x: Tensor, grid: Grid | Packed, bias: Tensor | None = None) -> Tensor:
        """Projects tokens to q, k and v and attends, (B, N, C) -> (B, N, out_dim)."""
        if isinstance(grid, Packed):
            parts: list[Any] = [self.sr, self.rel_pos, self.relative_position_bias_table]
            if any(part is not None for part in parts):  # each a matter of one grid
                return grid.map_images(self.mix, x)
        plane: Any = getattr(grid, "size", None)
        if self.sr is None:
            width, projected = self.mechanism.head_dim, self.qkv(x)
            if self.q_norm is None is self.k_norm and len({*self.widths}) == 1:
                # Heads before parts, so that one copy brings gradients into the order of tokens.
                projected = projected.unflatten(-1, (-1, width)).split(self.mechanism.num_heads, 2)
            else:
                projected = projected.split(self.widths, -1)
        else:
            grid = self._reduced(grid)
            projected = self.q(x), *self.kv(self.sr(x, grid)).split(self.widths[1:], dim=-1)
        q, k, v = queries_keys_values(self.mechanism, projected, x, (self.q_norm, self.k_norm))
        if self.relative_position_bias_table is not None:
            table = self.relative_position_bias_table
            bias = self._with_positions(relative_position_bias(table, self.mechanism.grid.size, plane), bias, grid)
        elif self.rel_pos is not None:
            own = self.rel_pos(q[:, grid.num_prefix :], self.mechanism.num_heads, plane)
            bias = self._with_positions(own, bias, grid)
        return attend(self.mechanism, q, k, v, grid, x=x, bias=bias)

    def _with_positions(self, own: Tensor, bias: Tensor | None, grid: Any) -> Tensor:
        """Adds the layer's bias of relative positions, (h, N, N) or (B, h, N, N); prefix tokens have none."""
        own = own if own.ndim == 4 else own[None]
        if grid.num_prefix:
            own = F.pad(own, (grid.num_prefix, 0, grid.num_prefix, 0))  # (1, h, N, N)
        return own if bias is None else own + bias

    def resize_tables(self, state: dict[str, Tensor], size_of: SizeOf) -> dict[str, Tensor]:
        """Resizes a checkpoint's table of relative positions for the nominal grid; see `Attention.resize_tables`."""
        name, own = "relative_position_bias_table", self.relative_position_bias_table
        if own is not None and name in state:
            state[name] = resize_position_table(state[name], own, self.mechanism.grid.size, size_of)
        return state

    def _reduced(self, grid: Any) -> Grid:
        return grid if self.sr is None else Grid(grid.size, self.sr.reduced(grid.size), grid.num_prefix)
