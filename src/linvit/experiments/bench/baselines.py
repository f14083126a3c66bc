"""Softmax attention as torch has it and as one writes it: what every mechanism is compared with."""

from torch import Tensor
from torch.nn import functional as F

from linvit.attention.base import Attention, Grid


class ScaledDotProduct(Attention):
    """Calls `torch.nn.functional.scaled_dot_product_attention`, O(N) memory where it has a fused kernel."""

    complexity = "O(N^2)"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """(B, h, N, dk), (B, h, M, dk), (B, h, M, d) -> (B, h, N, d)."""
        return F.scaled_dot_product_attention(q, k, v)


class NaiveSoftmax(Attention):
    """Writes `softmax(q k^T / sqrt(dk)) v` out in the precision of its inputs, O(N^2) memory."""

    complexity = "O(N^2)"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """(B, h, N, dk), (B, h, M, dk), (B, h, M, d) -> (B, h, N, d)."""
        weights: Tensor = ((q * self.key_dim**-0.5) @ k.mT).softmax(-1)  # (B, h, N, M)
        return weights @ v
