"""Separable attention (MobileViTv2): `o = relu(k) * sum_n c_n v_n`, entry by entry, with `c = softmax_n(w . x_n)`.

One weight per token, which all channels share, comes from the layer's input x by a vector w. The sum is the same for
all tokens, and each token gates it.

Paper: Mehta and Rastegari 2022, "Separable Self-attention for Mobile Vision Transformers".
Cost: `2 N C` MACs, O(C) memory. Rank: 1 per channel.

The paper's key is our v, which is mixed; its value is our k, which gates; the query is the layer's input itself. Its
layers run on the four phases of 2x2 pixels, each on its own: a window host with `dilation=2` does that. A bias of the
scores, which the reference's projection has, cancels in the softmax and is left out.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.base import Attention, Grid
from linvit.attention.declarations import Facts, Host
from linvit.attention.ops.functional import channelwise_factors, join_heads
from linvit.attention.ops.linear import key_mix, key_softmax


class SeparableAttention(Attention):
    """Separable self-attention, O(N d)."""

    host = Host(project="kv")
    facts = Facts(
        complexity="O(N)", same_grid=True, same_width=True, equivariant=True, channelwise=True, max_rank=1, packs=True
    )
    precision = "mixed"

    def __init__(self, dim: int, num_heads: int, grid: Grid, *, key_dim: int | None = None) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        self.scores = nn.Linear(dim, 1, bias=False)

    def core(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """(B, h, N, d) each -> (B, h, N, d)."""
        return F.relu(k) * key_mix(self.weights(q, grid), v, grid)

    def weights(self, q: Tensor, grid: Grid) -> Tensor:
        """Returns the weights c (B, 1, N, 1) of all tokens, which sum to 1."""
        return key_softmax(F.linear(join_heads(q), self.scores.weight.to(q.dtype)).unsqueeze(1), grid)

    def factors(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """`relu(k)_c` and the weights c, the same for every channel."""
        return channelwise_factors(F.relu(k), self.weights(q, grid).expand_as(q))
