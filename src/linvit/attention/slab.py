"""Simplified linear attention (SLAB): `o = relu(q) (relu(k)^T v) / (relu(q) sum relu(k) + eps) + DWC(v)`.

Focused linear attention without the focusing, without a scale, and with nothing added to the features.

Paper: Guo et al. 2024, "SLAB: Efficient Transformers with Simplified Linear Attention and Progressive
Re-parameterized Batch Normalization" (ICML). Its models also have their own norm, which is not part of this.
Cost: `(N + M) C dk + N h dk + k^2 P C` MACs with a kernel of side k. Rank: N per channel (d without the convolution).
"""

from typing import Any, Literal

from linvit.attention.base import Grid
from linvit.attention.focused import FocusedAttention


class SimplifiedLinearAttention(FocusedAttention):
    """Relu linear attention with a depthwise convolution of the values, O(N d^2): `focused` with other defaults."""

    facts = FocusedAttention.facts
    formula = FocusedAttention.formula

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        focus: bool = False,
        learn_scale: bool = False,
        relu_eps: float = 0.0,
        denominator: Literal["mean", "sum"] = "sum",
        **options: Any,
    ) -> None:
        super().__init__(
            dim,
            num_heads,
            grid,
            focus=focus,
            learn_scale=learn_scale,
            relu_eps=relu_eps,
            denominator=denominator,
            **options,
        )
