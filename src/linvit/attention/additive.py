"""Efficient additive attention (SwiftFormer): `o = P(g * q) + v`, with `g = sum_n a_n v_n` and `a = v w_g / ||v w_g||`.

Queries and values are brought to length 1 over all channels. One signed weight per token, `a`, which all channels
share, makes one vector g of all values; `P` is a linear layer.

Paper: Shaker et al. 2023, "SwiftFormer: Efficient Additive Attention for Transformer-based Real-time Mobile Vision
Applications".
Cost: `N C^2 + 2 N C` MACs. Rank: 1 per channel, before P.

The paper's query is v here and its key is q: there are no other values. It has no heads.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.base import Attention, Grid
from linvit.attention.declarations import Facts, Host
from linvit.attention.ops.activations import normalize, of_both
from linvit.attention.ops.functional import join_heads, split_heads
from linvit.attention.ops.linear import key_mix
from linvit.attention.packed import Packed
from linvit.errors import UserError

SMALLEST = 1e-12  # norm that is divided by, as in `torch.nn.functional.normalize`


class AdditiveAttention(Attention):
    """Efficient additive attention, O(N d^2)."""

    host = Host(project="qv")
    facts = Facts(
        complexity="O(N)",
        same_grid=True,
        same_width=True,
        equivariant=True,
        mask_value=0.0,  # any number will do: keys are not used, and values of 0 have no weight
        channelwise=True,
        packs=True,
        linear_in_values=False,
        matrix_is_exact=False,
        max_rank=1,
    )
    precision = "mixed"

    def __init__(self, dim: int, num_heads: int, grid: Grid, *, key_dim: int | None = None) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        self.w_g = nn.Parameter(torch.randn(dim, 1))
        self.proj = nn.Linear(dim, dim)

    def core(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """(B, h, N, d) each -> (B, h, N, d); k is not used."""
        q, v = of_both(lambda x: normalize(x, SMALLEST), join_heads(q), join_heads(v))  # (B, N, C)
        mixed = q * key_mix(self.weights(v, grid)[:, None], v[:, None], grid)[:, 0]
        out = F.linear(mixed, self.proj.weight.to(v.dtype), self.proj.bias.to(v.dtype)) + v
        return split_heads(out, self.num_heads)

    def weights(self, v: Tensor, grid: Grid | Packed) -> Tensor:
        """Returns the weights a (B, N, 1), of length 1, of values (B, N, C)."""
        weights = v @ self.w_g.to(v.dtype) * self.dim**-0.5
        if isinstance(grid, Packed):
            return grid.map_images(lambda own, _: normalize(own, SMALLEST, dims=(1,)), weights)
        return normalize(weights, SMALLEST, dims=(1,))

    def attention_matrix(self, q: Tensor, k: Tensor, v: Tensor | None, grid: Grid) -> Tensor:
        """Returns `q_c a^T` per channel c, (B, h, d, N, N), which mixes the normalised values, before P and `+ v`."""
        if v is None:
            raise UserError("the matrix of additive depends on the values; pass v=")
        q, v = of_both(lambda x: normalize(x, SMALLEST), join_heads(q), join_heads(v))
        weights = self.weights(v, grid)[:, None, None].mT  # (B, 1, 1, 1, N)
        return split_heads(q, self.num_heads).mT.unsqueeze(-1) * weights
