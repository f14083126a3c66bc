"""Poly-NL: `o = x * mean_n(k_n * v_n)`, entry by entry: a polynomial of third degree in the layer's input x.

Paper: Babiloni et al. 2021, "Poly-NL: Linear Complexity Non-local Layers with Polynomials". With k = x W1, v = x W2 and
the output projection W3 the layer is `(x * mean_n((x W1)_n * (x W2)_n)) W3`: the query is the input itself.
Cost: `(N + 3 M) C` elementwise operations, no matrix product, O(C) memory. Rank: 1 per channel.
"""

from typing import Literal

from torch import Tensor

from linvit.attention.base import Attention, Grid
from linvit.attention.ops.decorators import mixed_precision
from linvit.attention.ops.functional import channelwise_attention, channelwise_factors


class PolyNLAttention(Attention):
    """Polynomial non-local layer, O(N d). Unbounded in its input, so it needs a norm before it.

    Args:
        project_q: Project the queries as other mechanisms do (`projections` is then "qkv"); False takes the layer's
            input for them (the paper).
    """

    projections: Literal["qkv", "qv", "kv"] = "kv"
    channelwise = True
    narrow_keys = False
    complexity = "O(N)"
    equivariant = True
    max_rank = 1  # each channel is an outer product

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        key_dim: int | None = None,
        project_q: bool = False,
    ) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        self.projections = "qkv" if project_q else "kv"

    @mixed_precision
    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """(B, h, N, d), (B, h, M, d), (B, h, M, d) -> (B, h, N, d)."""
        return channelwise_attention(q, k / k.shape[-2], v)

    def factors(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """`q_c` and `k_c / M` for every channel c."""
        return channelwise_factors(q, k / k.shape[-2])
