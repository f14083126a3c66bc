"""Linformer attention: `o = softmax(q (E k)^T / sqrt(dk)) (F v)`, with learnable E and F of shape k x M.

E and F act along the tokens and leave k projected keys and values for any number M of tokens.

Paper: Wang et al. 2020, "Linformer: Self-Attention with Linear Complexity", Eq. 7.
Cost: `(N + M) (h dk + C) k` MACs. Rank: at most k.

E and F have as many columns as the nominal grid has keys, prefix tokens included. For another grid they are resized, in
a call and when weights of another image size are loaded.
"""

import math
from collections.abc import Sequence
from typing import Literal, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.base import Attention, Grid
from linvit.attention.declarations import Facts
from linvit.attention.ops.functional import SizeOf, resize_tokens, same_size
from linvit.errors import UserError, check_number


class LinformerAttention(Attention):
    """Softmax attention to k learned linear combinations of the tokens, O(N k d).

    Args:
        grid: Nominal grid; fixes the columns of E and F.
        k: Rows of E and F, capped at the number of keys of the nominal grid. 49 to 64 suit a ViT at 224 pixels. Weights
            for another image size need the same k, so choose one below the number of keys of both.
        share: Sharing of the matrices (Sec. 4 of the paper): "headwise": one E and one F for all heads; "kv": one
            matrix for all heads, keys and values; "layerwise": that matrix also for all layers of a backbone, as far
            as they have the same channels, k and nominal grid (in a pyramid: of a stage); "none": an E and an F for
            each head.
        share_kv_weights: F is E for any `share` of the heads: with "none" this is Nystromformer's Linformer.
            (lucidrains' `share_kv` also makes the keys the values, which is for the host's projections to do.)
        one_kv_head: All heads read the keys and values of the first head; a host may supply that one alone.
        init: "uniform" in +-1 / sqrt(k) (lucidrains) or "normal002", normal of standard deviation 0.02 (Nystromformer).
        resize: How E and F follow another grid. "interpolate": bicubic over the 2-D grid of patches, times the old
            over the new number of patches, which keeps the size of the sums E k and F v; the columns of prefix tokens
            stay. "slice": the first columns, for fewer tokens only (lucidrains).
        attn_drop: Dropout rate on the attention weights.
    """

    facts = Facts(complexity="O(N)")
    precision = "mixed"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        key_dim: int | None = None,
        k: int = 256,
        share: Literal["headwise", "kv", "layerwise", "none"] = "headwise",
        share_kv_weights: bool = False,
        one_kv_head: bool = False,
        init: Literal["uniform", "normal002"] = "uniform",
        resize: Literal["interpolate", "slice"] = "interpolate",
        attn_drop: float = 0.0,
    ) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        check_number("k", k, at_least=1, whole=True, note=", the number of projected keys")
        check_number("attn_drop", attn_drop, at_least=0, at_most=1)
        self.k = min(k, grid.num_keys)
        self.share = share
        self.one_kv_head = one_kv_head
        self.resize = resize
        self.attn_drop = attn_drop
        self.recompute = not attn_drop  # random numbers are drawn once
        self.declare(max_rank=self.k, linear_in_values=not one_kv_head)

        shape = (num_heads if share == "none" else 1, self.k, grid.num_keys)  # E and F: (h or 1, k, M)
        self.proj_k = nn.Parameter(torch.empty(shape))
        self.proj_v = None if share in ("kv", "layerwise") or share_kv_weights else nn.Parameter(torch.empty(shape))
        for matrix in self.parameters():
            if init == "uniform":
                nn.init.uniform_(matrix, -(self.k**-0.5), self.k**-0.5)
            else:
                nn.init.normal_(matrix, std=0.02)

    def tie(self, earlier: Sequence[Attention]) -> None:
        """With "layerwise", takes the matrix of the first layer that has one for the same channels, k and grid.

        A backbone calls it once, when it is built, with the mechanisms before this one, of any class and grid.
        """
        if self.share == "layerwise":
            self.proj_k = next((other.proj_k for other in earlier if self._fits(other)), self.proj_k)

    def _fits(self, other: Attention) -> TypeGuard["LinformerAttention"]:
        return (
            isinstance(other, LinformerAttention)
            and other.share == "layerwise"
            and (other.dim, other.k, other.grid) == (self.dim, self.k, self.grid)
        )

    def core(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """(B, h, N, dk), (B, h, M, dk), (B, h, M, d) -> (B, h, N, d)."""
        pairs = (self.proj_k, k), (self._value_matrix, v)
        if k.shape == v.shape:
            keys, values = self._project(grid, *pairs)
        else:
            (keys,), (values,) = (self._project(grid, pair) for pair in pairs)
        # The fused kernel stores no N x k weights, which would take more time than the products.
        keys, values = (x.expand(-1, self.num_heads, -1, -1) for x in (keys, values))
        return F.scaled_dot_product_attention(q, keys, values, dropout_p=self.attn_drop if self.training else 0.0)

    @property
    def _value_matrix(self) -> Tensor:
        """F, which is E if the two are shared."""
        return self.proj_k if self.proj_v is None else self.proj_v

    def _project(self, grid: Grid, *pairs: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """Returns E k and F v, (B, h or 1, k, d) each, for tokens (B, h, M, d) of one shape, by one product."""
        matrices = self._resized(torch.cat([matrix for matrix, _ in pairs]).to(pairs[0][1].dtype), self.grid, grid)
        groups = len(matrices) // len(pairs)  # of heads, with a matrix each
        tokens = [x[:, :1].expand(-1, groups, -1, -1) if self.one_kv_head else x for _, x in pairs]
        if groups == 1:
            rows = torch.cat([x.permute(2, 0, 1, 3) for x in tokens])  # (2 M, B, h, d)
            mixed = matrices @ rows.flatten(1).unflatten(0, (len(pairs), -1))  # (2, k, B h d)
            parts = mixed.flatten(0, 1).unflatten(1, rows.shape[1:]).chunk(len(pairs))  # (k, B, h, d)
            return tuple(x.permute(1, 2, 0, 3) for x in parts)
        rows = torch.cat([x.permute(1, 2, 0, 3) for x in tokens])  # (2 h, M, B, d)
        parts = (matrices @ rows.flatten(2)).unflatten(2, rows.shape[2:]).chunk(len(pairs))  # (h, k, B, d)
        return tuple(x.permute(2, 0, 1, 3) for x in parts)

    def _resized(self, matrix: Tensor, built: Grid, grid: Grid) -> Tensor:
        """Returns E or F of one grid, (h or 1, k, M), for the keys of another."""
        if self.resize == "slice":
            if grid.num_keys > built.num_keys:
                raise UserError(f"{_mismatch(built, grid)}; resize='slice' cannot grow, use resize='interpolate'")
            return matrix[..., : grid.num_keys]
        if grid.num_prefix != built.num_prefix:
            raise UserError(f"{_mismatch(built, grid)}; build it with num_prefix={grid.num_prefix}")
        if same_size(built.keys_size, grid.keys_size):
            return matrix
        prefix, patches = matrix[..., : built.num_prefix], matrix[..., built.num_prefix :]
        table = patches.flatten(0, 1).mT[None]  # (1, H*W, groups*k)
        resized = resize_tokens(table, built.keys_size, grid.keys_size)[0].mT.unflatten(0, matrix.shape[:2])
        shrink = math.prod(built.keys_size) / math.prod(grid.keys_size)
        return torch.cat([prefix, resized * shrink], dim=-1)

    def resize_tables(self, state: dict[str, Tensor], size_of: SizeOf) -> dict[str, Tensor]:
        """Resizes E and F of a checkpoint to the nominal grid, as `resize` says, if they have as many rows."""
        for name in {"proj_k", "proj_v"} & state.keys():
            matrix = state[name]
            if matrix.shape[:-1] != self.proj_k.shape[:-1]:
                continue
            if self.resize == "slice":
                if matrix.shape[-1] > self.grid.num_keys:
                    state[name] = matrix[..., : self.grid.num_keys]
            elif (size := size_of(matrix.shape[-1] - self.grid.num_prefix)) is not None:
                built = self.grid._replace(size=size, kv_size=None)
                state[name] = self._resized(matrix, built, self.grid)
        return state

    def factors(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """Returns the softmax weights and `F^T`."""
        (keys,) = self._project(grid, (self.proj_k, k))
        left = (q * self.key_dim**-0.5 @ keys.mT).softmax(-1)  # (B, h, N, k)
        right = self._resized(self._value_matrix.to(q.dtype), self.grid, grid).mT  # (h or 1, M, k)
        return left, right.expand(*left.shape[:2], -1, -1)

    def attention_matrix(self, q: Tensor, k: Tensor, v: Tensor | None, grid: Grid) -> Tensor:
        """Returns the matrices that all heads apply to the first head's values, (B, h, N, M); for `one_kv_head`."""
        left, right = self.factors(q, k, grid)
        return left @ right.mT


def _mismatch(built: Grid, given: Grid) -> str:
    (rows, columns), (new_rows, new_columns) = built.keys_size, given.keys_size
    return (
        f"linformer was built for keys of {rows}x{columns} patches and {built.num_prefix} prefix tokens, "
        f"got {new_rows}x{new_columns} and {given.num_prefix}"
    )
