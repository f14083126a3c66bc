"""LoLCATs: `o_i = sum_j e_ij v_j / sum_j e_ij`, softmax weights for near keys and linear attention for all others.

`e_ij = g exp(s_ij)` with `s_ij = q_i k_j / sqrt(d)` for keys of the query's window, and `e_ij = l phi(q_i) phi(k_j)`
for the others: g = sigmoid(window_factors) of each head, l = 1, or 1 - g with `affine`, and phi of Hedgehog
(`hedgehog`). With `shift`, as published, `e_ij = g exp(s_ij - max_j s_ij)`: the maximum is subtracted from the near
keys alone, so it does not cancel, and the linear part weighs the more the sharper a row.

Paper: Zhang et al. 2025, "LoLCATs: On Low-Rank Linearizing of Large Language Models" (ICLR). There, near keys are the
last 64 of a sequence; here they are the query's window in the grid, or its neighbourhood. Class and register tokens are
near to every query, and all keys are near to them.
Cost: `P (w^2 + p) (h dk + C + h) + p N (h dk + C) + 2 N f h dk + 4 P f (C + h)` MACs with f features of each sign and p
prefix tokens, where w divides both sides of the grid and near keys are windows. Rank: up to N. Rows sum to 1, and
all weights are positive.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from linvit.attention.base import Grid
from linvit.attention.declarations import Facts
from linvit.attention.hedgehog import HedgehogAttention
from linvit.attention.ops.local import Neighbourhoods, windows_of
from linvit.errors import check_choice, check_number, check_odd


class LoLCATsAttention(HedgehogAttention):
    """Softmax for near keys and learnt features for the others, with one normaliser, O(N w^2 + N d f).

    Args:
        window_size: Side w of the windows, in patches; odd for neighbourhoods.
        local: Near keys: those of the query's window ("windows"), or those at most w // 2 rows and columns away
            ("neighbourhood"), which takes w^2 times the memory of the keys.
        feature_dim: Columns f of the feature map; None means dk.
        affine: Weights g and 1 - g of the two parts; without it g and 1.
        shift: Subtract the maximum of a row's near logits from these alone, as published.
        init: Of the feature map, "identity" or "kaiming", as published.
    """

    facts = Facts(complexity="O(N)", same_grid=True, equivariant=False, packs=True)
    precision = "float32"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        key_dim: int | None = None,
        window_size: int = 7,
        local: Literal["windows", "neighbourhood"] = "windows",
        feature_dim: int | None = None,
        affine: bool = False,
        shift: bool = False,
        init: Literal["identity", "kaiming"] = "identity",
    ) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim, feature_dim=feature_dim, init=init)
        self.declare(max_rank=None)
        check_number("window_size", window_size, at_least=1, whole=True)
        check_choice("local", local, ["windows", "neighbourhood"])
        if local == "neighbourhood":
            self.declare(packs=False)
            check_odd("window_size", window_size, "3, 5 or 7 with local=neighbourhood")
        self.window_size, self.affine, self.shift = window_size, affine, shift
        self.near = windows_of if local == "windows" else Neighbourhoods
        self.exports_any_size = min(grid.size) > window_size  # torch.export keeps to a single window
        self.window_factors = nn.Parameter(torch.zeros(num_heads))

    def core(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, mask: Tensor | None = None) -> Tensor:
        """(B, h, N, dk), (B, h, N, dk), (B, h, N, d) -> (B, h, N, d); keys outside `mask` (B, N) take no part."""
        near, scale = self.near(grid, self.window_size), self.key_dim**-0.5
        g = self.window_factors.to(q.dtype).sigmoid()[:, None, None]
        weight = 1 - g if self.affine else torch.ones_like(g)  # of the linear part
        logits = scale * near.split(q) @ near.with_prefix(k).mT  # (B, n, h, L, K)
        kept = near.kept(mask, q)
        if kept is not None:
            logits = logits.masked_fill(~kept, -torch.inf)
        queries, keys = self.features(q, "q"), self.features(k, "k")
        if mask is not None:
            keys = keys * mask[:, None, :, None]
        ones = torch.cat([v, torch.ones_like(v[..., :1])], -1)  # whose last channel becomes the denominator
        beyond = near.beyond(queries, keys, ones)
        top = logits.amax(-1, keepdim=True)
        if self.shift:
            top = top.masked_fill(top == -torch.inf, 0)
        else:  # one number that divides both parts
            top = torch.where(beyond[..., -1:] > 0, top.clamp_min(0), top).detach()
            weight = weight * torch.exp(-top.clamp_min(0))
        sums = g * torch.exp(logits - top) @ near.with_prefix(ones) + weight * beyond
        return near.complete(near.join(sums[..., :-1] / sums[..., -1:]), q, k, v, scale, mask)

    def factors(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor] | None:
        """Returns None: the matrix has no thin factors."""
        return None
