"""Flow attention (Flowformer): `o = sigmoid(cs N/M) * (I q') (k'^T (M softmax(co) v))`, `q', k' = phi(q), phi(k)`.

Attention as a network that conserves flow. What flows into a query and out of a key is normalised to 1 by
`I_n = 1 / (q'_n . sum_m k'_m)` and `O_m = 1 / (k'_m . sum_n q'_n)`. The flow `cs_n = q'_n . sum_m k'_m O_m` that a
query then gets opens its gate, and the keys compete by the flow `co_m = k'_m . sum_n q'_n I_n` that each then gives.

Paper: Wu et al. 2022, "Flowformer: Linearizing Transformers with Conservation Flows".
Cost: `(N + M) C dk + 3 (N + M) h dk` MACs. Rank: at most dk, the width of a head's keys.

As in the code co is clamped to [-1, 1], and its mean is N / M: with as many keys as queries about half of the keys, and
with fewer keys all of them, are at 1, where they do not compete.
"""

from typing import Literal

import torch
from torch import Tensor

from linvit.attention.base import Attention, Grid
from linvit.attention.declarations import Facts
from linvit.attention.ops.activations import elu_plus_one, of_both
from linvit.attention.ops.linear import key_count, key_product, key_softmax
from linvit.attention.packed import Packed
from linvit.errors import check_number


class FlowAttention(Attention):
    """Flow attention, O(N d^2), without parameters.

    Args:
        feature_map: phi, "sigmoid" (the reference) or "elu" for elu(x) + 1.
        eps: Added to both factors of each of the four products.
        eps_out: Added to the four products themselves: 1e-6 in the reference's code for images, 0 in its other code.
    """

    facts = Facts(complexity="O(N)", equivariant=True, packs=True)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        key_dim: int | None = None,
        feature_map: Literal["sigmoid", "elu"] = "sigmoid",
        eps: float = 1e-6,
        eps_out: float = 1e-6,
    ) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        check_number("eps", eps, at_least=0)
        check_number("eps_out", eps_out, at_least=0)
        self.feature_map = feature_map
        self.declare(max_rank=self.key_dim)
        self.eps = eps
        self.eps_out = eps_out

    def core(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """(B, h, N, dk), (B, h, M, dk), (B, h, M, d) -> (B, h, N, d)."""
        left, right = self.factors(q, k, grid)
        return key_product(left, right, v, grid)

    def factors(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """`sigmoid(cs N/M) I q'` and `M softmax(co) k'`."""
        q, k = of_both(torch.sigmoid if self.feature_map == "sigmoid" else elu_plus_one, q, k)
        sources, sinks = q + self.eps, k + self.eps
        queries, keys = key_count(q, grid), key_count(k, grid)
        incoming = self._flow(sources, k, None, grid).reciprocal()  # I (B, h, N, 1)
        outgoing = self._flow(sinks, q, None, grid).reciprocal()  # O (B, h, M, 1)
        gate = (self._flow(sources, k, outgoing, grid) * (queries / keys)).sigmoid()  # (B, h, N, 1)
        given = self._flow(sinks, q, incoming, grid).clamp(-1, 1)
        return gate * incoming * q, key_softmax(given, grid) * keys * k  # (B, h, M, 1) times k

    def _flow(self, x: Tensor, others: Tensor, weights: Tensor | None, grid: Grid) -> Tensor:
        """`x . sum_m w_m y_m` of each token (B, h, N, dk), plus eps, over the others y with weights w, (B, h, N, 1)."""
        if isinstance(grid, Packed):
            weights = torch.ones_like(others[..., :1]) if weights is None else weights
            return key_product(x, others, weights, grid) + self.eps * x.sum(-1, keepdim=True) + self.eps_out
        total = others.sum(-2, keepdim=True).mT if weights is None else others.mT @ weights
        return x @ (total + self.eps) + self.eps_out
