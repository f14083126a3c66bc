"""Rank-augmented linear attention (RALA): `o = rot(q') (rot(a k')^T v) / (q' sum a k' + eps) + lepe(v)`.

`q' = elu(q) + 1`, `k' = elu(k) + 1`; `a = softmax_m(s mean(q') k'_m)` weighs the keys by the mean query, so that
`K^T V` is not a plain sum over all tokens. Rotary position embeddings (rot) turn the numerator alone, a depthwise
convolution of the values (lepe) brings the rank of the map to N, and the host multiplies the output by a linear gate.

Paper: Fan et al. 2025, "Breaking the Low-Rank Dilemma of Linear Attention" (CVPR). Follows the authors' code.
Cost: `(N + M) C dk + (N + M) h dk + k^2 P C` MACs with a kernel of side k. Rank: N per channel (d without the
convolution). Rows sum to 1 without rotation only; with it outputs have no bound, and may leave the range of float16.

The reference computes `elu(x) + 1` as a sum, which has no digit left below -16 in float32; here it is `exp(x)`. Prefix
tokens do not turn. Keys of another grid, which the reference does not have, stand where their patches are.
"""

from typing import Any

from torch import Tensor

from linvit.attention.base import Grid, Packed
from linvit.attention.kernels import Formula
from linvit.attention.ops.activations import elu_plus_one
from linvit.attention.ops.decorators import recomputed
from linvit.attention.ops.functional import upcast
from linvit.attention.ops.linear import key_count, key_mean, key_softmax, mean_product
from linvit.attention.ops.rotary import RotaryLinearAttention


class RALAAttention(RotaryLinearAttention):
    """Linear attention with weighted keys, a rotated numerator and a depthwise convolution of the values, O(N d^2).

    Args:
        key_weights: Weigh the keys by their similarity to the mean query.
    """

    facts = RotaryLinearAttention.facts
    precision = "float32"

    def __init__(self, dim: int, num_heads: int, grid: Grid, *, key_weights: bool = True, **options: Any) -> None:
        super().__init__(dim, num_heads, grid, **options)
        self.key_weights = key_weights

    def features(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """`elu(q) + 1` and `M a (elu(k) + 1)`."""
        q, k = super().features(q, k, grid)
        if self.key_weights:
            scores = mean_product(k, q, grid) * self.key_dim**-0.5  # (B, h, M, 1)
            k = k * (key_softmax(scores, grid) * key_count(k, grid))
        return q, k

    def formula(self, q: Tensor, k: Tensor, grid: Grid) -> Formula:
        """Returns the kernel, but for the weights of the keys, which are torch's."""
        weights = self._weights(q, k, grid) if self.key_weights else None
        return Formula("elu", eps=self.eps, mean=True, weights=weights, turns=self.turns(q, k, grid))

    @recomputed
    def _weights(self, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        """Returns `M a`, (B, h, M), in float32 also under autocast, which keeps the dtype of sums of products."""
        mean = key_mean(elu_plus_one(upcast(q)), grid) * self.key_dim**-0.5
        scores: Tensor = (elu_plus_one(upcast(k)) * mean).sum(-1)
        if isinstance(grid, Packed):
            return (key_softmax(scores[..., None], grid) * key_count(scores, grid))[..., 0]
        return scores.softmax(-1) * k.shape[-2]
