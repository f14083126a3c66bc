"""Efficient attention: `o = softmax_d(q) (softmax_n(k)^T v)`, queries over their channels and keys over the tokens.

Paper: Shen et al. 2021, "Efficient Attention: Attention with Linear Complexities", Section 3. Both factors being
softmaxes, every row of the map sums to 1 without a denominator.
Cost: `(N + M) C dk` MACs. Rank: at most dk, the width of a head's keys.
"""

import math
from typing import Literal

from torch import Tensor

from linvit.attention.base import Attention, Grid
from linvit.attention.declarations import Facts
from linvit.attention.kernels import Formula
from linvit.attention.ops.linear import key_count, key_product, key_softmax
from linvit.errors import check_number


class EfficientAttention(Attention):
    """Linear attention on queries and keys normalised one by one, O(N d^2).

    The paper has one head, its reference code several. The queries and keys of each head are normalised separately.

    Args:
        key_dim: Channels of q and k per head; None means `key_ratio` * C / h.
        key_ratio: Channels of the keys over those of the values; the product is rounded.
        normalization: "softmax": queries over the channels of a head, keys over the tokens; "scaling": both divided by
            sqrt(M), the plain product over the number of keys.
    """

    facts = Facts(complexity="O(N)", equivariant=True, packs=True)
    precision = "mixed"
    recompute = False

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        key_dim: int | None = None,
        key_ratio: float = 1.0,
        normalization: Literal["softmax", "scaling"] = "softmax",
    ) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        check_number("key_ratio", key_ratio, above=0)
        if key_ratio != 1:
            self.set_key_dim(round(key_ratio * self.head_dim), option=f"key_ratio={key_ratio}", key_dim=key_dim)
        self.normalization = normalization
        self.declare(max_rank=self.key_dim, mask_value=-math.inf if normalization == "softmax" else None)

    def core(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """(B, h, N, dk), (B, h, M, dk), (B, h, M, d) -> (B, h, N, d)."""
        left, right = self.factors(q, k, grid)
        return key_product(left, right, v, grid)

    def formula(self, q: Tensor, k: Tensor, grid: Grid) -> Formula | None:
        """Returns the formula, with softmax."""
        return Formula("softmax") if self.normalization == "softmax" else None

    def factors(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """Returns the normalised queries and keys."""
        if self.normalization == "softmax":
            return q.softmax(-1), key_softmax(k, grid)
        root = key_count(k, grid) ** 0.5
        return q / root, k / root
