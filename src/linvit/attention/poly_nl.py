"""Poly-NL: `o = x * mean_n(k_n * v_n)`, entry by entry: a polynomial of third degree in the layer's input x.

Paper: Babiloni et al. 2021, "Poly-NL: Linear Complexity Non-local Layers with Polynomials". With k = x W1, v = x W2 and
the output projection W3 the layer is `(x * mean_n((x W1)_n * (x W2)_n)) W3`: the query is the input itself.
Cost: `(N + 2 M + 1) C` elementwise operations, no matrix product, O(C) memory. Rank: 1 per channel.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from linvit.attention.base import Attention, Grid
from linvit.attention.declarations import Facts, Host
from linvit.attention.ops.functional import channelwise_factors
from linvit.attention.ops.linear import channelwise_attention


class PolyNLAttention(Attention):
    """Polynomial non-local layer, O(N d). Unbounded in its input, so it needs a norm before it.

    Args:
        project_q: Project the queries as other mechanisms do (`projections` is then "qkv"); False takes the layer's
            input for them (the paper).
        alpha_beta: Return `alpha q + beta o` with learnable scalars that begin at 1: the paper's own residual. There
            alpha q skips the output projection; here both are projected.
        reduce: "mean" over the keys (the paper) or "sum", which grows with their number and overflows float16
            (65,504) at 12,544 tokens of standard deviation 16, even if it is computed in float32.
    """

    host = Host(project="kv")
    facts = Facts(complexity="O(N)", same_width=True, equivariant=True, channelwise=True, max_rank=1, packs=True)
    precision = "mixed"
    recompute = False

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        key_dim: int | None = None,
        project_q: bool = False,
        alpha_beta: bool = False,
        reduce: Literal["mean", "sum"] = "mean",
    ) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        self.declare(project="qkv" if project_q else "kv")
        self.reduce = reduce
        self.alpha, self.beta = (nn.Parameter(torch.ones(1)) if alpha_beta else None for _ in range(2))

    def core(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """(B, h, N, d), (B, h, M, d), (B, h, M, d) -> (B, h, N, d)."""
        out = channelwise_attention(self._scaled(q), k, v, grid, mean=self.reduce == "mean")
        return out if self.alpha is None else self.alpha.to(q.dtype) * q + out

    def _scaled(self, q: Tensor) -> Tensor:
        """Returns the queries, times beta."""
        return q if self.beta is None else self.beta.to(q.dtype) * q

    def factors(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """`beta q_c` and `k_c / M` for every channel c; the residual `alpha q` does not depend on v."""
        return channelwise_factors(self._scaled(q), k / k.shape[-2] if self.reduce == "mean" else k)
