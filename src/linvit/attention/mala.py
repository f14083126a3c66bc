"""Magnitude-aware linear attention (MALA): `o = (1 + 1/(z + eps)) (s/M) rot(q') (rot(k')^T v) - z mean(v) + lepe(v)`.

`q' = elu(q) + 1`, `k' = elu(k) + 1`, `z = s q' mean(k')`, `s = dk^-1/2`. Subtracting z keeps the sum of a row at 1, as
a division would, while the magnitude of the query still sharpens the row: entries may be negative. Rotary position
embeddings (rot) turn the first term alone, a depthwise convolution of the values (lepe) brings the rank of the map to
N, and the host multiplies the output by a linear gate.

Paper: Fan et al. 2025, "Rectifying Magnitude Neglect in Linear Attention" (ICCV). Follows the authors' code.
Cost: `(N + M) C dk + N h dk + k^2 P C` MACs with a kernel of side k. Rank: N per channel (d + 1 without the
convolution). Rows sum to 1 without rotation only.

The reference computes `elu(x) + 1` as a sum, which has no digit left below -16 in float32; here it is `exp(x)`. Prefix
tokens do not turn. Keys of another grid, which the reference does not have, stand where their patches are.
"""

import torch
from torch import Tensor

from linvit.attention.base import Grid
from linvit.attention.kernels import Formula
from linvit.attention.ops.rotary import RotaryLinearAttention, rotary_scale


class MALAAttention(RotaryLinearAttention):
    """Linear attention normalised by a difference, a rotated term and a depthwise convolution of the values, O(N d^2).

    Args:
        eps: Added to z in the quotient.
    """

    facts = RotaryLinearAttention.facts
    extra_rank = 1

    @property
    def difference(self) -> float:
        """The factor s."""
        return float(self.key_dim**-0.5)

    def formula(self, q: Tensor, k: Tensor, grid: Grid) -> Formula:
        """Returns the kernel."""
        return Formula("elu", eps=self.eps, difference=self.difference, turns=self.turns(q, k, grid))

    def core_factors(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """`[(1 + 1/(z + eps)) (s/M) rot(q'), -z/M]` and `[rot(k'), 1]`."""
        q, k = self.features(q, k, grid)
        count, t = k.shape[-2], q @ k.mean(-2, keepdim=True).mT
        scale, _ = rotary_scale(t, count, self.eps, self.difference)  # (B, h, N, 1)
        q, k = self.rotated(q, k, grid)
        left = torch.cat([q * scale, t * (-self.difference / count)], dim=-1)
        return left, torch.cat([k, torch.ones_like(k[..., :1])], dim=-1)
