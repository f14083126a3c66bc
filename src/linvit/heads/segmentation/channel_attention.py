"""Attention among the channels of a map: softmax as in MAResU-Net, and the linear form of the same authors.

A mechanism of `linvit.attention` mixes tokens; these mix channels, so they are parts of heads.
"""

import torch
from torch import Tensor, nn

from linvit.attention.ops.decorators import full_precision
from linvit.attention.ops.functional import normalize


class ChannelAttention(nn.Module):
    """`x + gamma A x` with `A = softmax(max(E) - E)`, `E = x x^T`, on a map (B, C, H, W) as C rows of H W entries.

    Paper: Fu et al. 2019, "Dual Attention Network for Scene Segmentation", with the sign of their code, by which
    unlike channels attend to each other. gamma begins at 0.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H, W)."""
        rows = x.flatten(2)  # (B, C, N)
        return x + self.gamma * self.mix(rows, rows, rows).view_as(x)

    @full_precision
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, C, N) each -> (B, C, N)."""
        energy = q @ k.mT  # (B, C, C)
        return torch.softmax(energy.amax(-1, keepdim=True) - energy, -1) @ v


class LinearChannelAttention(ChannelAttention):
    """`x + gamma o`, `o_c = (sum_c' v_c' + sum_m (v_c . k_m) k_m) / (N + k_c . (sum_m k_m + eps))` over the rows c.

    Paper: Li et al. 2020, "Linear Attention Mechanism: An Efficient Attention for Semantic Segmentation", as its code
    has it: v is x, k is x of length one at each of N = H W positions (across channels), the numerator's query is v, and
    the denominator has N where the number of channels belongs, so weights do not sum to 1.

    Args:
        eps: Added to every entry of the sum of the k.
        norm_eps: Smallest norm that a position is divided by. The reference has none and gives NaN for a zero position.
    """

    def __init__(self, eps: float = 1e-6, norm_eps: float = 1e-12) -> None:
        super().__init__()
        self.eps = eps
        self.norm_eps = norm_eps

    @full_precision
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, C, N) each -> (B, C, N)."""
        k = normalize(k, self.norm_eps, dims=(-2,))
        total = k.sum(-2).unsqueeze(-1) + self.eps  # (B, N, 1)
        numerator: Tensor = v.sum(-2, keepdim=True) + (v @ k.mT) @ k
        return numerator / (v.shape[-1] + k @ total)
