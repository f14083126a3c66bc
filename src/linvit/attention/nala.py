"""Norm-aware linear attention (NaLaFormer): `o = rot(Q) (rot(K)^T v / M) / (Q mean(K) + eps) + lepe(v)`.

`Q = [relu(q / |q|)^p, relu(-q / |q|)^p]` with `p = 3 (1/2 + tanh |q|)` for every token, so that a query of larger norm
has a sharper row, and `K = [relu(k)^3, relu(-k)^3]`, which keep the signs of q and k. Rotary position embeddings (rot)
turn each half in the numerator, a depthwise convolution of the values (lepe) brings the rank of the map to N, and the
host normalises the output (LayerNorm) and multiplies it by a SiLU gate.

Paper: Meng et al. 2026, "Norm x Direction: Restoring the Missing Query Norm in Vision Linear Attention" (ICML).
Follows the authors' code.
Cost: `2 (N + M) C dk + 2 N h dk + k^2 P C` MACs with a kernel of side k. Rank: N per channel (2 d without the
convolution). Rows sum to 1 without rotation only; with it outputs have no bound, and may leave the range of float16.

In the reference a query of 0 is NaN; here it gives 0, beside the convolution. Prefix tokens do not turn. Keys of
another grid, which the reference does not have, stand where their patches are.
"""

from typing import Any

import torch
from torch import Tensor

from linvit.attention.base import Grid
from linvit.attention.declarations import Gate, OutNorm
from linvit.attention.ops.activations import by_sign
from linvit.attention.ops.functional import l2_norm, safe_norm
from linvit.attention.ops.rotary import RotaryLinearAttention
from linvit.errors import check_number


class NaLaAttention(RotaryLinearAttention):
    """Linear attention whose sharpness follows the norms of the queries, with a rotated numerator, O(N d^2).

    Args:
        power: A query's entries are raised to `power` times 1/2 to 3/2, by its norm.
        key_power: Exponent of a key's entries.
        out_norm: "ln": the host normalises the output over all channels, before the gate; "none".
    """

    facts = RotaryLinearAttention.facts
    precision = "float32"
    feature_ratio = 2

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        power: float = 3.0,
        key_power: float = 3.0,
        out_norm: OutNorm = "ln",
        gate: Gate = "silu",
        **options: Any,
    ) -> None:
        super().__init__(dim, num_heads, grid, gate=gate, **options)
        check_number("power", power, at_least=2, note=", since half of it is the least exponent")
        check_number("key_power", key_power, at_least=1)
        self.power = power
        self.key_power = key_power
        self.declare(norm=out_norm)

    def features(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """Returns Q (B, h, N, 2 dk) and K (B, h, M, 2 dk)."""
        power = self.power * (0.5 + l2_norm(q).tanh())
        # As exp and log, which are several times as fast as a power; log(0) has no derivative.
        logs = (q.abs() + torch.finfo(q.dtype).tiny).log() - safe_norm(q, 1e-12).log()
        return by_sign((logs * power).exp(), q), by_sign(k.abs() ** self.key_power, k)

    def frequencies(self) -> dict[str, Any]:
        """Those of each half, which turns like a whole head."""
        return {"width": self.key_dim}
