"""Sparse-linear attention with windows: `o = a o_s + (1 - a) o_l`, softmax inside windows and linear attention outside.

`o_s = softmax(q k^T / sqrt(d)) v` over the keys of the query's window, and
`o_l = phi(q) (phi(k)^T v) / (phi(q) sum_m phi(k_m) + 1e-5)` over the rest of the keys, or over all. They are combined
by a learnt weight of each head, `o = a o_s + (1 - a) o_l` (SLA2), or by a linear map that all heads share and that is
zero at first, `o = o_s + W o_l + b` (SLA), with which a network with windows is converted without a change. With
`topk`, as published, blocks of queries select blocks of keys in the order of the sequence, by the largest products of
their mean query and key, in the place of windows.

Paper: Zhang et al. 2025, "SLA: Beyond Sparsity in Diffusion Transformers via Fine-Tunable Sparse-Linear Attention",
and its successor SLA2 (Zhang et al. 2026). Class and register tokens are keys of every query and see all keys.
Cost: `(P w^2 + (N + P) p) (h dk + C) + 2 P C dk + 2 P h dk + 2 P` MACs with p prefix tokens, if w divides both sides
of the grid and `linear: rest`; with `topk: t` the softmax part has t P keys instead of w^2. Rank: up to N; that of o_l
at most the number of features, in each window with `rest`.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.base import Attention, Grid
from linvit.attention.declarations import Facts
from linvit.attention.ops.activations import elu_plus_one
from linvit.attention.ops.linear import linear_attention
from linvit.attention.ops.local import SelectedBlocks, Windows, window_attention, windows_of
from linvit.errors import UserError, check_choice, check_number

EPS = 1e-5


class SLAttention(Attention):
    """Softmax inside windows and linear attention outside, O(N w^2 + N d^2).

    Args:
        window_size: Side w of the windows, in patches.
        linear: Keys of the linear part: the "rest", outside the window, or "all".
        combine: "alpha": `a o_s + (1 - a) o_l` with a = sigmoid(alpha) of each head, and a = 1 where no key is left;
            "proj": `o_s + W o_l + b`.
        feature_map: "softmax" over the channels of a head, "elu" for elu(x) + 1, or "relu".
        init_alpha: Initial value of alpha, before the sigmoid.
        topk: Share of the blocks of keys that each block of queries selects, in the place of windows; None means
            windows. Work then grows with N^2, in this proportion.
        blocks: Tokens of a block of queries, and of keys, with `topk`.
    """

    facts = Facts(complexity="O(N)", same_grid=True, packs=True)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        key_dim: int | None = None,
        window_size: int = 7,
        linear: Literal["rest", "all"] = "rest",
        combine: Literal["alpha", "proj"] = "alpha",
        feature_map: Literal["softmax", "elu", "relu"] = "softmax",
        init_alpha: float = 2.0,
        topk: float | None = None,
        blocks: Sequence[int] = (64, 64),
    ) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        check_number("window_size", window_size, at_least=1, whole=True)
        check_number("init_alpha", init_alpha)
        check_choice("linear", linear, ["rest", "all"])
        check_choice("combine", combine, ["alpha", "proj"])
        check_choice("feature_map", feature_map, ["softmax", "elu", "relu"])
        self.window_size, self.linear, self.feature_map, self.topk = window_size, linear, feature_map, topk
        if topk is not None:
            check_number("topk", topk, above=0, at_most=1, note=", or null for windows")
            self.declare(complexity="O(N^2)", packs=False)
        if isinstance(blocks, str) or not isinstance(blocks, Sequence) or len(blocks) != 2:
            raise UserError(f"blocks must be two numbers of tokens, such as [64, 64]; got {blocks!r}")
        for size in blocks:
            check_number("blocks: a block", size, at_least=1, whole=True)
        self.blocks = tuple(blocks)
        # torch.export keeps to a single window, and to the number of selected blocks.
        self.exports_any_size = topk is None and min(grid.size) > window_size
        self.alpha: nn.Parameter | None = None
        self.proj_l: nn.Linear | None = None
        if combine == "alpha":
            self.alpha = nn.Parameter(torch.full((num_heads,), float(init_alpha)))
        else:
            self.proj_l = nn.Linear(self.head_dim, self.head_dim)
            nn.init.zeros_(self.proj_l.weight)
            nn.init.zeros_(self.proj_l.bias)
            self.declare(linear_in_values=False, matrix_is_exact=False)

    def features(self, x: Tensor) -> Tensor:
        """Returns features phi of queries or keys, (B, h, N, dk) -> (B, h, N, dk)."""
        if self.feature_map == "softmax":
            return x.softmax(-1)
        return elu_plus_one(x) if self.feature_map == "elu" else F.relu(x)

    def near(self, q: Tensor, k: Tensor, grid: Grid, mask: Tensor | None = None) -> Windows:
        """Returns the near keys of queries and keys (B, h, N, dk): windows, or selected blocks."""
        if self.topk is None:
            return windows_of(grid, self.window_size)
        return SelectedBlocks(grid, q, k, self.topk, self.blocks, mask)

    def core(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, mask: Tensor | None = None) -> Tensor:
        """(B, h, N, dk), (B, h, N, dk), (B, h, N, d) -> (B, h, N, d); keys outside `mask` (B, N) take no part."""
        windows = self.near(q, k, grid, mask)
        local = window_attention(q, k, v, windows, self.key_dim**-0.5, mask)
        keys = self.features(k)
        if mask is not None:
            keys = keys * mask[:, None, :, None]
        if self.linear == "all":
            distant, left = linear_attention(self.features(q), keys, v, EPS, grid=grid), None
        else:
            distant, left = self._rest(self.features(q), keys, v, windows, mask)
        if self.proj_l is not None:
            weight, bias = self.proj_l.weight.to(v.dtype), self.proj_l.bias.to(v.dtype)
            return local + F.linear(distant, weight, bias)
        assert self.alpha is not None
        a = self.alpha.to(v.dtype).sigmoid()[:, None, None]
        if left is not None:
            a = torch.where(left, a, 1)
        return a * local + (1 - a) * distant

    def _rest(self, q: Tensor, k: Tensor, v: Tensor, near: Windows, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Linear attention over the patches that are not near, (B, h, N, d), and where there are any, (..., N, 1).

        Zeros for prefix tokens and where no key is left.
        """
        tokens = (q.new_ones(1, q.shape[2]) if mask is None else mask.to(q.dtype))[:, None, :, None]
        left = near.join(near.beyond(torch.ones_like(tokens), tokens, tokens)) > 0
        sums = near.join(near.beyond(q, k, torch.cat([v, torch.ones_like(v[..., :1])], -1)))  # the last: denominator
        front = (0, 0, near.prefix, 0)
        return F.pad(sums[..., :-1] / (sums[..., -1:] + EPS), front), F.pad(left, front)

    def attention_matrix(self, q: Tensor, k: Tensor, v: Tensor | None, grid: Grid) -> Tensor:
        """Returns the matrix (B, h, N, N) of the softmax part; the linear part mixes channels with `combine: proj`."""
        one_hot = torch.eye(q.shape[2], dtype=q.dtype, device=q.device).expand(*q.shape[:2], -1, -1)
        return window_attention(q, k, one_hot, self.near(q, k, grid), self.key_dim**-0.5)
