"""Linear attention whose numerator alone is rotated, beside a depthwise convolution of the values.

`o = rot(Q) (rot(K)^T v / M) / (Q mean K + eps) + lepe(v)` for features Q and K of the queries and keys.
"""

from torch import Tensor

from linvit.attention.base import Gate, Grid
from linvit.attention.ops.activations import elu_plus_one
from linvit.attention.ops.decorators import full_precision, recomputed
from linvit.attention.ops.rotary import check_rotary, rotate
from linvit.attention.ops.value_conv import ConvolvedAttention, value_conv
from linvit.errors import check_number


class RotaryLinearAttention(ConvolvedAttention):
    """What rala, mala, nala, mlla and pola_pp share. Features are `elu + 1`, unless a subclass has others.

    Args:
        rotary: Rotate the features in the numerator, alone; `key_dim` must then be a multiple of 4.
        lepe_kernel: Side of the depthwise kernel of the values, odd; 0 leaves the convolution out.
        gate: What the host multiplies the output by: "linear" a projection of the layer's input, "silu" SiLU of one,
            "none" nothing.
        eps: Added to the denominator.
    """

    complexity = "O(N)"
    convolution = "lepe"
    feature_ratio = 1  # features per channel of q and k
    extra_rank = 0  # of the matrix, beside that of the features
    width_multiple = 4  # what the channels of q and k per head must be a multiple of under rotation

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        key_dim: int | None = None,
        rotary: bool = True,
        lepe_kernel: int = 5,
        gate: Gate = "linear",
        eps: float = 1e-6,
    ) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        check_number("eps", eps, at_least=0)
        if rotary:
            check_rotary(dim, num_heads, self.key_dim, multiple=self.width_multiple)
        self.max_rank = self.feature_ratio * self.key_dim + self.extra_rank
        self.rotary = rotary
        self.gate = gate
        self.eps = eps
        self.lepe = value_conv("lepe_kernel", dim, lepe_kernel)
        self.channelwise = self.lepe is not None

    @recomputed
    @full_precision
    def kernel(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """The linear attention."""
        return self.mixed(q.contiguous(), k.contiguous(), v, grid)  # contiguous per head, once for all that follows

    def mixed(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """(B, h, N, dk), (B, h, M, dk), (B, h, M, d) -> (B, h, N, d), in float32 or float64."""
        q, k = self.features(q, k)
        denominator = q @ k.mean(-2, keepdim=True).mT + self.eps  # (B, h, N, 1)
        q, k = self.rotated(q, k, grid)
        return q @ (k.mT @ v / k.shape[-2]) * denominator.reciprocal()

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Features Q (B, h, N, r) and K (B, h, M, r) before rotation: `elu + 1` of the entries."""
        return elu_plus_one(q), elu_plus_one(k)

    def rotated(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """Features turned by their positions."""
        return rotate(q, k, grid) if self.rotary else (q, k)

    def kernel_factors(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """Factors (B, h, N, r), (B, h, M, r) of the linear attention."""
        q, k = self.features(q, k)
        denominator = q @ k.mean(-2, keepdim=True).mT + self.eps
        q, k = self.rotated(q, k, grid)
        return q / denominator, k / k.shape[-2]
