"""LARA: linear randomised attention, `o_n = sum_c w_cn b_c`, `b_c = sum_m softmax_m(s u_c.k_m - s |k_m|^2 / 2) v_m`.

Softmax attention is an expectation over random features u. It is estimated by a few u_c, one from each of m proposals:
normal distributions around `mu_c = qbar_c + kbar_c`, where qbar and kbar are the patch queries and keys pooled to a
small square, then a linear layer and LayerNorm. The weights w_cn over c, which sum to 1, are those of self-normalised
importance sampling; see `weighting`. Noise is drawn while training; in evaluation u_c is mu_c. `s = dk^-1/2`.

Paper: Zheng et al. 2022, "Linear Complexity Randomized Self-attention Mechanism" (ICML), Sec. 4. Follows the authors'
code.
Cost: `m h dk (2 N + M + m + 2 dk) + m C (N + M)` MACs for m landmarks, pooling apart; `mixed` adds 2 m^2 h dk, and
`weighting: balance` saves N of the 2 N. Rank: m. Rows sum to 1, and all weights are positive.

Prefix tokens, which the reference does not have, are queries and keys and take no part in the landmarks.
"""

import math
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.base import Attention, Grid
from linvit.attention.declarations import Facts
from linvit.attention.ops.functional import join_heads, pooled, split_heads
from linvit.errors import UserError, check_number


class LARAAttention(Attention):
    """Softmax attention estimated by importance sampling from m landmarks, O(N m d).

    Args:
        landmarks: Landmarks m, a square such as 9, 16 or 49.
        mixed: Let the landmarks of the keys attend to each other first.
        weighting: How the proposals are combined: "optimal", the balance heuristic plus `alpha` times each query's
            deviation in its softmax weights of the landmarks; or "balance", that heuristic alone.
        alpha: See `weighting`.
    """

    facts = Facts(complexity="O(N)")

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        key_dim: int | None = None,
        landmarks: int = 49,
        mixed: bool = False,
        weighting: Literal["optimal", "balance"] = "optimal",
        alpha: float = 1.0,
    ) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        check_number("landmarks", landmarks, at_least=1, whole=True)
        check_number("alpha", alpha, at_least=0)
        self.side = math.isqrt(landmarks)
        if self.side**2 != landmarks:
            raise UserError(
                f"landmarks must be a square, such as {self.side**2} or {(self.side + 1) ** 2}; got {landmarks}"
            )
        self.landmarks = landmarks
        self.declare(max_rank=landmarks)
        self.mixed, self.weighting, self.alpha = mixed, weighting, alpha
        width = self.key_dim
        self.q_bar = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width))
        self.k_bar = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """(B, h, N, dk), (B, h, M, dk), (B, h, M, d) -> (B, h, N, d)."""
        noise = None
        if self.training:
            noise = torch.randn(*q.shape[:2], self.landmarks, q.shape[3], dtype=q.dtype, device=q.device)
        return self.core(q, k, v, grid, noise)

    def core(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, noise: Tensor | None) -> Tensor:
        """Returns the attention through landmarks, which noise (B, h, m, dk), if any, moves."""
        left, right = self._weights(q, k, grid, noise)
        return left @ (right @ v)

    def _weights(self, q: Tensor, k: Tensor, grid: Grid, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns weights of landmarks for each query (B, h, N, m), and of keys for each landmark (B, h, m, M)."""
        scale = self.key_dim**-0.5
        q_bar = self._landmarks(self.q_bar, q, grid)
        k_bar = self._landmarks(self.k_bar, k, Grid(grid.keys_size, num_prefix=grid.num_prefix))
        if self.mixed:
            k_bar = (scale * k_bar @ k_bar.mT).softmax(-1) @ k_bar
        mu = q_bar + k_bar  # (B, h, m, dk)
        drawn = scale * (mu if noise is None else mu + noise)

        def log_kernel(x: Tensor) -> Tensor:
            """(B, h, m, tokens)."""
            logs: Tensor = drawn @ x.mT - scale / 2 * x.square().sum(-1, keepdim=True).mT
            return logs

        to_keys, to_means = log_kernel(k), log_kernel(mu)
        proposal = to_means.logsumexp(-1, keepdim=True)
        logits = drawn @ q.mT + to_keys.logsumexp(-1, keepdim=True)  # (B, h, m, N)
        if self.weighting == "balance":
            logits = logits - proposal
        else:
            own = to_means.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
            near = (scale * q_bar @ q.mT).softmax(-1)
            shares = (own - proposal).exp() + self.alpha * (near - near.mean(-2, keepdim=True))
            logits = logits + shares.clamp_min(1e-8).log() - own
        return logits.softmax(-2).mT, to_keys.softmax(-1)

    def _landmarks(self, layers: nn.Sequential, x: Tensor, grid: Grid) -> Tensor:
        """Returns pooled patches through a linear layer and LayerNorm, (B, h, m, dk)."""
        means = split_heads(pooled(grid.plane(join_heads(x)), self.side).flatten(2).mT, self.num_heads)
        linear, norm = cast("tuple[nn.Linear, nn.LayerNorm]", tuple(layers))
        means = F.linear(means, linear.weight.to(x.dtype), linear.bias.to(x.dtype))
        return F.layer_norm(means, means.shape[-1:], norm.weight.to(x.dtype), norm.bias.to(x.dtype))

    def factors(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """Returns the weights of queries and of keys, without noise."""
        left, right = self._weights(q, k, grid)
        return left, right.mT
