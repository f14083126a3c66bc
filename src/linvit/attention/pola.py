"""Polarity-aware linear attention (PolaFormer): `o = [LA(Q, K, v_1), LA(Q', K, v_2)] + DWC(v)`, signs kept apart.

`Q = [q+, q-]`, `Q' = [q-, q+]` and `K = [k+, k-]` with `x+ = relu(x)^p`, `x- = relu(-x)^p`: the first half of a head's
values is mixed where queries and keys agree in sign, the second half where they differ. `LA` is linear attention,
`Q (K^T v / M) / (Q mean K + eps)`, and the powers p are learnt.

Paper: Meng et al. 2025, "PolaFormer: Polarity-aware Linear Attention for Vision Transformers" (ICLR). Follows the
authors' code, with focused attention's scale, position encoding and convolution (DWC); the host gates the output.
Cost: `2 (N + M) C dk + 4 N h dk + k^2 P C` MACs with a kernel of side k. Rank: N per channel (2 d without the
convolution).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.base import Grid
from linvit.attention.declarations import Gate
from linvit.attention.focused import FocusedAttention
from linvit.attention.ops.activations import signed_powers
from linvit.attention.ops.linear import key_sums, linear_attention, linear_factors
from linvit.attention.packed import Packed
from linvit.errors import check_number


class PolaAttention(FocusedAttention):
    """Linear attention on positive and negative parts, with learnt powers and a convolution of the values, O(N d^2).

    A token whose query is 0 in all channels gets 0 from the linear attention: nothing is added to the features.

    Args:
        alpha: The powers are `p = 1 + alpha sigmoid(power)`, one per channel of a head, `1 + alpha / 2` at first.
        gate: Factor of the output, by the host: "linear" a projection of the layer's input (the reference),
            "silu" SiLU of one, "none" nothing.
    """

    facts = FocusedAttention.facts
    core_channelwise = True

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        key_dim: int | None = None,
        alpha: float = 4.0,
        dwc_kernel: int = 5,
        dwc: bool = True,
        pos_enc: bool = True,
        learn_scale: bool = True,
        eps: float = 1e-6,
        gate: Gate = "linear",
    ) -> None:
        super().__init__(
            dim,
            num_heads,
            grid,
            key_dim=key_dim,
            dwc_kernel=dwc_kernel,
            dwc=dwc,
            pos_enc=pos_enc,
            learn_scale=learn_scale,
            eps=eps,
            focus=False,
            relu_eps=0.0,
        )
        check_number("alpha", alpha, at_least=0)
        self.alpha = alpha
        self.relu_alone = False
        self.declare(gate=gate, channelwise=True, max_rank=2 * self.key_dim)
        self.power = nn.Parameter(torch.zeros(1, num_heads, 1, self.key_dim))

    def core(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """Returns linear attention of both halves of the values, (B, h, N, d), in at least float32."""
        q, k = self.features(q, k, grid)
        if isinstance(grid, Packed):
            both = zip((q, self._exchanged(q.mT).mT), v.tensor_split([self._first_half], -1), strict=True)
            return torch.cat([linear_attention(x, k, y, self.eps, mean=True, grid=grid) for x, y in both], -1)
        context, total = key_sums(k, v.to(k.dtype), mean=True)  # (B, h, 2 dk, d), (B, h, 2 dk, 1)
        half = self._first_half
        differing = self._exchanged(torch.cat([context[..., half:], total], dim=-1))
        product = q @ torch.cat([context[..., :half], total, differing], dim=-1)  # of each half the denominator last
        parts = product.split([half, 1, self.head_dim - half, 1], dim=-1)
        return torch.cat([x * (y + self.eps).reciprocal() for x, y in (parts[:2], parts[2:])], dim=-1)

    def _phi(self, wide: torch.dtype, dtype: torch.dtype, x: Tensor) -> Tensor:
        """Returns the features [x+, x-] (..., h, N, 2 dk) of tokens (..., N, h dk)."""
        x = x.to(wide)
        if self.scale is not None:
            x = x * F.softplus(self.scale.to(x.dtype)).reciprocal()
        x = x.unflatten(-1, (self.num_heads, -1)).transpose(-3, -2)
        return signed_powers(x, 1 + self.alpha * self.power.to(x.dtype).sigmoid())

    @property
    def _first_half(self) -> int:
        """Channels of a head's values that are mixed where signs agree: the larger half."""
        return (self.head_dim + 1) // 2

    def _exchanged(self, features: Tensor) -> Tensor:
        """Returns [x-, x+] of [x+, x-], along dimension -2."""
        return features.roll(self.key_dim, -2)

    def core_factors(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """Those of linear attention for each channel."""
        q, k = self.features(q, k, grid)
        pairs = [linear_factors(x, k, self.eps, mean=True) for x in (q, self._exchanged(q.mT).mT)]
        widths = (self._first_half, self.head_dim - self._first_half)
        left, right = (
            torch.cat([x.unsqueeze(2).expand(-1, -1, w, -1, -1) for x, w in zip(each, widths, strict=True)], dim=2)
            for each in zip(*pairs, strict=True)
        )  # (B, h, d, N, 2 dk), (B, h, d, M, 2 dk)
        return left, right
