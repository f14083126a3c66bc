"""Mamba-like linear attention (MLLA): `o = rot(q') (rot(k')^T v / M) / (q' mean(k') + eps) + lepe(v)`, v the input.

`q' = elu(q) + 1`, `k' = elu(k) + 1`. The values are the input of the projections itself. Rotary position embeddings
(rot) turn the numerator alone and run over all C channels before the head split: the first heads turn with the row,
the last with the column. A depthwise convolution of the values (lepe) brings the rank of the map to N. The host puts a
linear layer, a convolution and SiLU before the projections, and multiplies the output by a SiLU gate.

Paper: Han et al. 2024, "Demystify Mamba in Vision: A Linear Attention Perspective" (NeurIPS). Follows the authors'
code.
Cost: `(N + M) C dk + N h dk + k^2 P C` MACs with a kernel of side k. Rank: N per channel (d without the convolution).
Rows sum to 1 without rotation only; with it outputs have no bound, and may leave the range of float16.

The reference takes square images of one size. It computes `elu(x) + 1` as a sum, which has no digit left below -16 in
float32; here it is `exp(x)`. Prefix tokens do not turn.
"""

from typing import Any, Literal

from torch import Tensor

from linvit.attention.base import Grid
from linvit.attention.declarations import Gate, Host, Stem
from linvit.attention.kernels import Formula
from linvit.attention.ops.rotary import RotaryLinearAttention, check_rotary


class MLLAAttention(RotaryLinearAttention):
    """Linear attention of the layer's input with a rotated numerator and a depthwise convolution, O(N d^2).

    Args:
        rotary: Channels over which the frequencies run: "all_heads" is all channels, a multiple of 4 in heads of
            even width; "per_head" those of each head, a multiple of 4, as in RALA; "none" disables rotation.
        stem: Layers of the host before its projections: "conv_silu" or "none"; see `linvit.Host`.
    """

    host = Host(project="qk")
    facts = RotaryLinearAttention.facts

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        key_dim: int | None = None,
        rotary: Literal["all_heads", "per_head", "none"] = "all_heads",
        lepe_kernel: int = 3,
        stem: Stem = "conv_silu",
        gate: Gate = "silu",
        eps: float = 1e-6,
    ) -> None:
        super().__init__(
            dim, num_heads, grid, key_dim=key_dim, rotary=False, lepe_kernel=lepe_kernel, gate=gate, eps=eps
        )
        self.declare(stem=stem, rotary=rotary != "none")
        self.across_heads = rotary == "all_heads"
        if self.facts.rotary:
            check_rotary(dim, num_heads, self.key_dim, across=self.across_heads, option="rotary='none'")

    def frequencies(self) -> dict[str, Any]:
        """Frequencies over all heads, if asked for."""
        return {"width": self.num_heads * self.key_dim, "last": False} if self.across_heads else {}

    def formula(self, q: Tensor, k: Tensor, grid: Grid) -> Formula:
        """Returns the kernel."""
        return Formula("elu", eps=self.eps, mean=True, turns=self.turns(q, k, grid))
