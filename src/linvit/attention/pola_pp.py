"""PolaFormer++ attention: `o_i = rot(Q_i) (rot(K)^T v_i / M) / (Q_i mean(K) + eps) + lepe(v_i)` for two halves i of v.

`K = exp([relu(k), relu(-k)]) - 1`; `Q_1 = exp(sigmoid(s_1) [relu(q), relu(-q)]) - 1` pairs entries of the same sign and
`Q_2 = exp(sigmoid(s_2) [relu(-q), relu(q)]) - 1` those of opposite sign, with learnable s_1, s_2. Each map acts on one
half of the channels of a head. Rotary position embeddings (rot) turn the numerators alone, a depthwise convolution of
the values (lepe) brings the rank of the maps to N, and the host multiplies the output by a linear gate.

Paper: Meng et al. 2025, "PolaFormer: Polarity-aware Linear Attention for Vision Transformers"; this is its authors'
next mechanism, PolaFormer++. Follows their code.
Cost: `2 (N + M) C dk + 4 N h dk + k^2 P C` MACs with a kernel of side k. Rank: N per channel (2 d without the
convolution). Rows sum to 1 without rotation only; with it outputs have no bound, and may leave the range of float16.

In the reference exp overflows at entries of 88. Here K is divided by the exponential of the largest entry of each
channel, and Q_i, multiplied by that, by its largest entry in each token; both factors cancel in the quotient.
Prefix tokens do not turn. Keys of another grid, which the reference does not have, stand where their patches are.
"""

from typing import Any

import torch
from torch import Tensor, nn

from linvit.attention.base import Grid, Packed
from linvit.attention.ops.activations import by_sign
from linvit.attention.ops.linear import key_count, key_max, key_product, key_sum
from linvit.attention.ops.rotary import RotaryLinearAttention, rotate_tokens


class PolaPPAttention(RotaryLinearAttention):
    """Linear attention of exponential features by sign, one map per half of a head's channels, O(N d^2).

    Args:
        rotary: Rotate the features in the numerators, alone; `key_dim` must then be even.
    """

    facts = RotaryLinearAttention.facts
    precision = "float32"
    feature_ratio = 2
    core_channelwise = True
    width_multiple = 2

    def __init__(self, dim: int, num_heads: int, grid: Grid, **options: Any) -> None:
        super().__init__(dim, num_heads, grid, **options)
        self.declare(channelwise=True)
        self.s1 = nn.Parameter(torch.zeros(1, num_heads, 1, 2 * self.key_dim))
        self.s2 = nn.Parameter(torch.zeros(1, num_heads, 1, 2 * self.key_dim))

    def core(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """Returns the two maps on their halves, in float32 or float64."""
        maps, k = self._terms(q, k, grid)
        if isinstance(grid, Packed):
            both = zip(maps, v.tensor_split(2, -1), strict=True)
            return torch.cat([key_product(q, k, half, grid) / denominator for (q, denominator), half in both], -1)
        contexts = (k.mT @ v).tensor_split(2, -1)  # the first is the wider if d is odd
        halves = [q @ context / denominator for (q, denominator), context in zip(maps, contexts, strict=True)]
        return torch.cat(halves, dim=-1)

    def core_factors(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """`rot(Q_i) / (Q_i sum(K) + M eps)` for the channels of half i, and `rot(K)` for all."""
        maps, k = self._terms(q, k, grid)
        left = torch.stack([q / denominator for q, denominator in maps], dim=2)  # (B, h, 2, N, 2 dk)
        half = torch.arange(self.head_dim, device=q.device) >= (self.head_dim + 1) // 2  # of every channel
        return left[:, :, half.long()], k.unsqueeze(2).expand(-1, -1, self.head_dim, -1, -1)

    def _terms(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """Returns rotated Q_i (B, h, N, 2 dk) with denominators (B, h, N, 1) for both i, and rotated K (B, h, M, 2 dk).

        All are scaled as said above, and K is not divided by M.
        """
        largest = key_max(torch.cat([k, -k], -1).detach(), grid).clamp(min=0)  # (B, h, 1, 2 dk)
        plus, minus = largest.chunk(2, -1)
        size = k.abs()
        k = by_sign((size - _chosen(k, plus, minus)).exp() * -torch.expm1(-size), k)
        total, eps = key_sum(k, grid), self.eps * key_count(k, grid)

        if self.facts.rotary:  # which mixes the entries of a pair: these are scaled alike
            pairs = largest.unflatten(-1, (-1, 2))
            gap = (pairs.amax(-1, keepdim=True) - pairs).flatten(-2)  # (B, h, 1, 2 dk)
            k = rotate_tokens(k * (-gap).exp(), grid, keys=True)
        maps, size = [], q.abs()
        for x, s in ((q, self.s1), (-q, self.s2)):
            power = size * _chosen(x, *s.to(q.dtype).sigmoid().chunk(2, -1))
            exponent = power + _chosen(x, plus, minus)
            top = exponent.detach().amax(-1, keepdim=True)  # (B, h, N, 1)
            features = by_sign((exponent - top).exp() * -torch.expm1(-power), x)
            product = (features * total).sum(-1, keepdim=True) if isinstance(grid, Packed) else features @ total.mT
            denominator = product + (eps * (-top).exp()).clamp(min=torch.finfo(q.dtype).tiny)
            if self.facts.rotary:
                features = rotate_tokens(features * gap.clamp(max=80).exp(), grid)  # e^88 is the end of float32
            maps.append((features, denominator))
        return maps, k


def _chosen(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """`first` where x is positive, `second` where it is negative, and their mean where it is 0."""
    return torch.addcmul((first + second) / 2, (first - second) / 2, x.detach().sign())
