"""Linear attention: `o = phi(q) (phi(k)^T v) / (phi(q) sum_n phi(k_n) + eps)`.

Paper: Katharopoulos et al. 2020, "Transformers are RNNs", Eqs. 4-7, with `phi` = elu + 1; relu is the other usual
feature map.
Cost: `(N + M) C dk + N h dk` MACs. Rank: at most d, the head width.
"""

import math
from typing import Literal

from torch import Tensor
from torch.nn import functional as F

from linvit.attention.base import Attention, Grid
from linvit.attention.declarations import Facts
from linvit.attention.kernels import Formula
from linvit.attention.ops.activations import elu_plus_one
from linvit.attention.ops.linear import linear_attention, linear_factors
from linvit.errors import check_number


class LinearAttention(Attention):
    """Linear attention with elu + 1 or relu features, O(N d^2).

    Args:
        feature_map: "elu" for elu(x) + 1, or "relu".
        normalize: Divide by the denominator. Without it, both features are scaled by the fourth root of their number of
            tokens instead, and rows do not sum to 1 (the linear attention of Nystromformer's comparisons). The
            output is then unbounded: it grows with the third power of the input, and overflows float16 (65,504) at
            heads of 32 channels of standard deviation 16, even if it is computed in float32.
        eps: Added to the denominator.
        relu_eps: Added to the relu features. With 0, a query without a positive entry gives exactly 0 (NaN if eps is
            0 as well); with FLatten's 1e-6 it gives the mean of all values.
    """

    facts = Facts(complexity="O(N)", equivariant=True, packs=True)
    precision = "mixed"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        key_dim: int | None = None,
        feature_map: Literal["elu", "relu"] = "elu",
        normalize: bool = True,
        eps: float = 1e-6,
        relu_eps: float = 0.0,
    ) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        check_number("eps", eps, at_least=0)
        check_number("relu_eps", relu_eps, at_least=0)
        self.feature_map: Literal["elu", "relu"] = feature_map
        self.normalize = normalize
        self.eps = eps
        self.relu_eps = relu_eps
        maskable = normalize and (feature_map == "elu" or not relu_eps)
        self.declare(
            max_rank=self.key_dim, packs=self.facts.packs and normalize, mask_value=-math.inf if maskable else None
        )

    def features(self, x: Tensor) -> Tensor:
        """Returns the feature map phi, element by element."""
        if self.feature_map == "elu":
            return elu_plus_one(x)
        return F.relu(x) + self.relu_eps if self.relu_eps else F.relu(x)

    def core(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """(B, h, N, dk), (B, h, M, dk), (B, h, M, d) -> (B, h, N, d)."""
        if self.normalize:
            return linear_attention(self.features(q), self.features(k), v, self.eps, grid=grid)
        left, right = self.factors(q, k, grid)
        return left @ (right.mT @ v)

    def formula(self, q: Tensor, k: Tensor, grid: Grid) -> Formula | None:
        """Returns the formula, if it is normalised."""
        return Formula(self.feature_map, eps=self.eps, relu_eps=self.relu_eps) if self.normalize else None

    def factors(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """`diag(1 / (Q K^T 1 + eps)) Q` and `K`, or `Q / N^(1/4)` and `K / M^(1/4)`."""
        q, k = self.features(q), self.features(k)
        if self.normalize:
            return linear_factors(q, k, self.eps)
        return q * q.shape[-2] ** -0.25, k * k.shape[-2] ** -0.25
