"""CosFormer: `o_n = sum_m w_nm v_m / max(sum_m w_nm, eps)`, `w_nm = relu(q_n).relu(k_m) cos(pi (n - m) / (2 L))`.

Near tokens weigh more than far ones. As `cos(a - b) = cos a cos b + sin a sin b`, it is linear attention with features
`[relu(x) cos, relu(x) sin]`. n and m count the tokens in their order, prefix tokens first, and L is the larger of N and
M: the paper is on text, and has no rows and columns.

Paper: Qin et al. 2022, "cosFormer: Rethinking Softmax in Attention" (ICLR), Eqs. 9-12. Follows the authors' code.
Cost: `2 (N + M) C dk + 2 N h dk` MACs. Rank: at most 2 dk. Rows sum to 1; a query without a positive entry gives 0.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from linvit.attention.base import Attention, Grid
from linvit.attention.declarations import Facts
from linvit.attention.ops.activations import of_both
from linvit.attention.ops.functional import wide
from linvit.attention.ops.linear import linear_attention
from linvit.attention.packed import Packed
from linvit.errors import check_number


class CosFormerAttention(Attention):
    """Linear attention with relu features that are weighted by the distance of tokens in their order, O(N d^2).

    Args:
        eps: Minimum denominator.
    """

    facts = Facts(complexity="O(N)", mask_value=-math.inf, packs=True)
    precision = "mixed"

    def __init__(self, dim: int, num_heads: int, grid: Grid, *, key_dim: int | None = None, eps: float = 1e-6) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        check_number("eps", eps, above=0)
        self.declare(max_rank=2 * self.key_dim)
        self.eps = eps

    def core(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """(B, h, N, dk), (B, h, M, dk), (B, h, M, d) -> (B, h, N, d)."""
        return linear_attention(*features(q, k, grid), v, self.eps, least=True, grid=grid)

    def factors(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """`diag(1 / max(Q K^T 1, eps)) Q` and `K`."""
        q, k = features(q, k, grid)
        return q / (q @ k.sum(-2, keepdim=True).mT).clamp_min(self.eps), k


def features(q: Tensor, k: Tensor, grid: Grid | Packed) -> tuple[Tensor, Tensor]:
    """`[relu(x) cos, relu(x) sin]` of queries and of keys, (..., 2 dk)."""
    longest = max(q.shape[-2], k.shape[-2])

    def angles(tokens: int, longest: int) -> Tensor:
        return torch.arange(tokens, dtype=wide(q), device=q.device)[:, None] * (math.pi / 2 / longest)

    def phi(x: Tensor) -> Tensor:
        if isinstance(grid, Packed):
            angle = torch.cat([angles(tokens, tokens) for tokens in grid.lengths])
        else:
            angle = angles(x.shape[-2], longest)
        x = F.relu(x)
        return torch.cat([x * angle.cos().to(x.dtype), x * angle.sin().to(x.dtype)], -1)

    return of_both(phi, q, k)
