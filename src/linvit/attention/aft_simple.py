"""AFT-simple: `o = sigmoid(q) * sum_n w_n * v_n`, entry by entry, with `w = softmax(k)` over the tokens per channel.

Paper: Zhai et al. 2021, "An Attention Free Transformer", the variant without position biases. It is Hydra attention
with other kernels.
Cost: `(2 N + 3 M) C` elementwise operations, no matrix product, O(C) memory. Rank: 1 per channel.
"""

import math
from typing import Literal

from torch import Tensor

from linvit.attention.base import Attention, Grid
from linvit.attention.declarations import Facts
from linvit.attention.ops.activations import ACTIVATIONS
from linvit.attention.ops.functional import channelwise_factors
from linvit.attention.ops.linear import channelwise_attention, key_softmax


class AFTSimpleAttention(Attention):
    """The attention-free transformer's simple variant, O(N d).

    Args:
        query_act: Function of the queries that gates the output: "sigmoid" (the paper's default), "tanh", "relu" or
            "identity".
    """

    facts = Facts(
        complexity="O(N)",
        same_width=True,
        equivariant=True,
        mask_value=-math.inf,
        channelwise=True,
        max_rank=1,
        packs=True,
    )
    precision = "mixed"
    recompute = False

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        key_dim: int | None = None,
        query_act: Literal["sigmoid", "tanh", "relu", "identity"] = "sigmoid",
    ) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        self.query_act = query_act

    def core(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """(B, h, N, d), (B, h, M, d), (B, h, M, d) -> (B, h, N, d)."""
        return channelwise_attention(*self.features(q, k, grid), v, grid)

    def features(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """Returns the gate (B, h, N, d) and the weights of the keys (B, h, M, d)."""
        return ACTIVATIONS[self.query_act](q), key_softmax(k, grid)

    def factors(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """Returns the gate and the weights of the keys, one column per channel."""
        return channelwise_factors(*self.features(q, k, grid))
