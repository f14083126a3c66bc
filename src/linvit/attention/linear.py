"""Linear attention: `o = phi(q) (phi(k)^T v) / (phi(q) sum_n phi(k_n) + eps)`.

Paper: Katharopoulos et al. 2020, "Transformers are RNNs", Eqs. 4-7, with `phi` = elu + 1; relu is the other usual
feature map.
Cost: (N + M) C d MACs. Rank: at most d, the head width.
"""

from typing import Literal

from torch import Tensor
from torch.nn import functional as F

from linvit.attention.base import Attention, Grid
from linvit.attention.cost import Cost
from linvit.attention.functional import linear_attention, linear_factors
from linvit.attention.precision import full_precision
from linvit.errors import check_choice


class LinearAttention(Attention):
    """Linear attention with elu + 1 or relu features, O(N d^2).

    Args:
        dim: Channels C over all heads.
        num_heads: Heads h.
        grid: Nominal grid (unused: nothing here has a fixed length).
        key_dim: Channels of q and k per head; None means C / h.
        feature_map: "elu" for elu(x) + 1, or "relu".
        eps: Added to the denominator.
        relu_eps: Added to the relu features. With 0, a query without a positive entry gives exactly 0; with FLatten's
            1e-6 it gives the mean of all values.
    """

    complexity = "O(N)"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        key_dim: int | None = None,
        feature_map: Literal["elu", "relu"] = "elu",
        eps: float = 1e-6,
        relu_eps: float = 0.0,
    ) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        check_choice("feature_map", feature_map, ["elu", "relu"])
        self.feature_map = feature_map
        self.eps = eps
        self.relu_eps = relu_eps

    def features(self, x: Tensor) -> Tensor:
        """The feature map phi, element by element."""
        return F.elu(x) + 1 if self.feature_map == "elu" else F.relu(x) + self.relu_eps

    @full_precision
    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """(B, h, N, dk), (B, h, M, dk), (B, h, M, d) -> (B, h, N, d)."""
        return linear_attention(self.features(q), self.features(k), v, self.eps)

    def factors(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """`diag(1 / (Q K^T 1 + eps)) Q` and `K`."""
        return linear_factors(self.features(q), self.features(k), self.eps)

    def rank_bound(self, grid: Grid) -> int:
        """The head width, or the number of tokens if that is smaller."""
        return min(super().rank_bound(grid), self.key_dim)

    def cost(self, grid: Grid) -> Cost:
        """`K^T v`, its product with Q, and the denominators; the feature maps."""
        n, m, width = grid.num_queries, grid.num_keys, self.key_dim * self.num_heads
        features = (n + m) * width
        return Cost(
            matmul=features * self.head_dim + n * width,
            elementwise=features + m * width + n * width + n * self.num_heads,
            transcendental=features if self.feature_map == "elu" else 0,
            parameters=self.num_parameters(),
        )
