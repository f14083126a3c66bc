"""Gated differential linear attention: `o = RMSNorm(A_1 v - lambda A_2 v) sigmoid(gate)`.

`y = A_1 v - lambda A_2 v` with `A_b = phi(q_b) phi(k_b)^T / (phi(q_b) sum_m phi(k_bm) + 1e-6)` on the two halves of a
head's queries and keys, phi = elu + 1, and a learnt lambda of each channel; then `o = RMSNorm(y) sigmoid(W x + b)`
with x the layer's input.

Paper: Zheng et al. 2026, "Gated Differential Linear Attention: A Linear-Time Decoder for High-Fidelity Medical
Segmentation" (CVPR Findings). Follows the core of the authors' code; the rest of their layer, a second branch on
convolved projections whose output is joined to the first, is not part of the mechanism.
Cost: `2 N C dk + N h dk + N C^2` MACs. Rank: at most dk per channel. Rows of channel c sum to 1 - lambda_c before the
norm.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.base import Attention, Grid
from linvit.attention.declarations import Facts, Host
from linvit.attention.ops.activations import elu_plus_one
from linvit.attention.ops.functional import linear_as_given, split_heads
from linvit.attention.ops.linear import linear_attention, linear_factors
from linvit.errors import UserError

EPS, NORM_EPS = 1e-6, 1e-5


class GDLAttention(Attention):
    """The difference of two linear attentions per head, with RMSNorm and a gate, O(N d^2)."""

    host = Host(input=True)
    facts = Facts(
        complexity="O(N)",
        equivariant=True,
        packs=True,
        same_grid=True,
        channelwise=True,
        linear_in_values=False,
        matrix_is_exact=False,
    )

    def __init__(self, dim: int, num_heads: int, grid: Grid, *, key_dim: int | None = None) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        if self.key_dim % 2:
            raise UserError(
                f"gdla halves the keys of a head, which have {self.key_dim} channels; make it an even number"
            )
        self.lambda_scale = nn.Parameter(0.1 * torch.randn(num_heads, self.head_dim))
        self.norm = nn.Parameter(torch.ones(self.head_dim))
        self.gate_proj = nn.Linear(dim, dim)
        self.declare(max_rank=self.key_dim, state_size=self.key_dim * (dim + num_heads))

    def core(
        self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, x: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """(B, h, N, dk) twice, (B, h, N, d), and the layer's input x (B, N, C) -> (B, h, N, d)."""
        if x is None:
            raise UserError("gdla makes its gate from the layer's input; pass it as x=")
        return self.mixed(q, k, v, split_heads(linear_as_given(self.gate_proj, x), self.num_heads), mask, grid)

    def mixed(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, mask: Tensor | None = None, grid: Grid | None = None
    ) -> Tensor:
        """Returns the formula, with the gate (B, h, N, d) before its sigmoid."""
        first, second = (linear_attention(*half, v, EPS, grid=grid) for half in self._halves(q, k, mask))
        y = first - self.lambda_scale.to(v.dtype)[:, None] * second
        return F.rms_norm(y, (self.head_dim,), self.norm.to(v.dtype), NORM_EPS) * gate.to(v.dtype).sigmoid()

    def _halves(self, q: Tensor, k: Tensor, mask: Tensor | None = None) -> list[tuple[Tensor, Tensor]]:
        """Returns features of both halves of queries and keys."""
        keys = elu_plus_one(k) if mask is None else elu_plus_one(k) * mask[:, None, :, None]
        return list(zip(elu_plus_one(q).chunk(2, -1), keys.chunk(2, -1), strict=True))

    def attention_matrix(self, q: Tensor, k: Tensor, v: Tensor | None, grid: Grid, x: Tensor) -> Tensor:
        """Returns the matrices (B, h, d, N, N) of the channels, before norm and gate."""
        first, second = (left @ right.mT for left, right in (linear_factors(*half, EPS) for half in self._halves(q, k)))
        return first[:, :, None] - self.lambda_scale[:, :, None, None] * second[:, :, None]
