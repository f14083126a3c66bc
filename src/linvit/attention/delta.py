"""The delta rule in several directions: `S_t = a S + beta k (v - a S^T k)^T` replaces what a key has stored.

In each order of the tokens, in full, `S_t = a_t S_{t-1} + beta_t k_t (v_t - a_t S_{t-1}^T k_t)^T` and
`o_t = S_t^T q_t / sqrt(d)`, with q and k divided by `sqrt(sum of squares + 1e-6)`; outputs of all orders are added. The
orders are row by row and its reverse, with `directions: 4` column by column and its reverse as well.
`beta = sigmoid(W x)` of the layer's input. `delta` has a = 1. `gated_delta` has
`a = exp(-exp(A_log) softplus(W_a x + dt_bias))`; SiLU on q, k and v before, RMSNorm behind, and the host's SiLU gate.

Paper: Yang et al. 2025, "Gated Delta Networks: Improving Mamba2 with Delta Rule" (ICLR), after "Parallelizing Linear
Transformers with the Delta Rule over Sequence Length" (NeurIPS 2024) by the same first author. Follows
flash-linear-attention without its causal convolutions; its scan for images adds the reversed half without reversing it
back (a defect).
Cost: `o S (3 T h dk + 2 T C + 3 C dk + h (T^2 - 1) / 3) + g N C h` MACs in o directions, with N tokens padded to S in
chunks of T = 64, and g = 1, or 2 where it is gated. Rank: up to N. Entries have either sign, and there is no
normaliser.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.base import Attention, Grid
from linvit.attention.declarations import Facts, Host
from linvit.attention.ops.decorators import supports_custom_autograd
from linvit.attention.ops.functional import initial_steps, is_exporting, linear_as_given
from linvit.attention.ops.orders import both_directions, chunked, columns, over_chunks
from linvit.errors import UserError

CHUNK, EPS, NORM_EPS = 64, 1e-6, 1e-5


class DeltaAttention(Attention):
    """The delta rule in two or four directions, O(N d^2), sequential over chunks of 64 tokens.

    Args:
        directions: 2: row by row and back; 4: column by column and back as well.
    """

    host = Host(input=True)
    facts = Facts(complexity="O(N)", same_grid=True, fades=True)
    exports_loop = True  # over chunks

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        key_dim: int | None = None,
        directions: Literal[2, 4] = 2,
    ) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        if directions not in (2, 4):
            raise UserError(f"directions must be 2 or 4; got {directions!r}")
        self.directions = directions
        self.b_proj = nn.Linear(dim, num_heads, bias=False)
        self.declare(state_size=directions * self.key_dim * dim)

    def core(
        self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, x: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """(B, h, N, dk) twice, (B, h, N, d), and the layer's input x (B, N, C) -> (B, h, N, d)."""
        if x is None:
            raise UserError(f"{type(self).__name__} makes its gates from the layer's input; pass it as x=")
        return self.directed(q, k, v, *self.gates(x, mask), grid)

    def gates(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Strengths beta of writing and logarithms of the factors a, (B, h, N), of the layer's input (B, N, C)."""
        beta = linear_as_given(self.b_proj, x).sigmoid().mT
        beta = beta if mask is None else beta * mask[:, None]
        return beta, torch.zeros_like(beta)

    def directed(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log: Tensor, grid: Grid) -> Tensor:
        """Returns the formula, with beta and log a, (B, h, N)."""
        return self.mixed(unit(q), unit(k), v, beta.to(v.dtype), log.to(v.dtype), grid)

    def mixed(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log: Tensor, grid: Grid) -> Tensor:
        """Returns the sum over all directions, linear in v."""
        given = q * self.key_dim**-0.5, k, v, beta.unsqueeze(-1), log.unsqueeze(-1)
        out = both_directions(delta_rule, *given)
        if self.directions == 4:
            out = out + both_directions(delta_rule, *given, order=columns(grid, q.device))
        return out


class GatedDeltaAttention(DeltaAttention):
    """The gated delta rule in two or four directions, O(N d^2), sequential over chunks of 64 tokens.

    Args:
        options: Those of `DeltaAttention`.
    """

    host = Host(input=True, gate="silu")
    facts = Facts(complexity="O(N)", same_grid=True, fades=True, linear_in_values=False, matrix_is_exact=False)

    def __init__(self, dim: int, num_heads: int, grid: Grid, **options: Any) -> None:
        super().__init__(dim, num_heads, grid, **options)
        self.a_proj = nn.Linear(dim, num_heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(num_heads).uniform_(0, 16).clamp_min(1e-4).log())
        self.dt_bias = nn.Parameter(initial_steps(num_heads))
        self.norm = nn.Parameter(torch.ones(self.head_dim))

    def gates(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Strengths beta of writing and logarithms of the factors a, (B, h, N), of the layer's input (B, N, C)."""
        beta, _ = super().gates(x, mask)
        a = self.a_proj.weight.to(x.dtype) @ x.mT  # (B, h, N); its gradient has strides that F.linear compiled refuses
        log = -self.A_log.to(a.dtype).exp()[:, None] * F.softplus(a + self.dt_bias.to(a.dtype)[:, None])
        return beta, log if mask is None else log * mask[:, None]

    def directed(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log: Tensor, grid: Grid) -> Tensor:
        """Returns the formula, with beta and log a, (B, h, N)."""
        out = super().directed(F.silu(q), F.silu(k), F.silu(v), beta, log, grid)
        return F.rms_norm(out, (self.head_dim,), self.norm.to(out.dtype), NORM_EPS)

    def attention_matrix(self, q: Tensor, k: Tensor, v: Tensor | None, grid: Grid, x: Tensor) -> Tensor:
        """Returns the matrix (B, h, N, N) that acts on SiLU(v), before the norm."""
        one_hot = torch.eye(q.shape[2], dtype=q.dtype, device=q.device).expand(*q.shape[:2], -1, -1)
        return self.mixed(unit(F.silu(q)), unit(F.silu(k)), one_hot, *self.gates(x), grid)


def unit(x: Tensor) -> Tensor:
    """Queries or keys divided by their length."""
    return x * (x.square().sum(-1, keepdim=True) + EPS).rsqrt()


def delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log: Tensor) -> Tensor:
    """Returns the recurrence from the first token to the last, in chunks, (B, h, N, d).

    In a chunk the written values u solve a triangular system: `u_t = beta_t (v_t - e^{G_t} S^T k_t - sum_{j<t}
    e^{G_t - G_j} (k_t k_j) u_j)` with the state S before the chunk and the sums G of `log` since then (Yang et al.
    2025, Section 3.3).

    Args:
        q: Queries (B, h, N, dk), scaled.
        k: Keys (B, h, N, dk).
        v: Values (B, h, N, d).
        beta: Strengths of writing (B, h, N, 1).
        log: Logarithms of the factors a (B, h, N, 1), at most 0.
    """
    tokens, width, length = q.shape[2], v.shape[3], CHUNK if is_exporting() else 1
    while length < min(CHUNK, tokens):
        length *= 2
    q, k, v, beta, log = (chunked(x, length) for x in (q, k, v, beta, log))  # (B, h, n, T, ...)
    since = log.cumsum(-2)
    causal = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    decay = torch.where(causal, (since - since.mT).tril().exp(), 0)  # (B, h, n, T, T)
    solved = inverse(beta * (k @ k.mT) * decay) @ (beta * torch.cat([v, since.exp() * k], -1))
    own, correction = solved[..., :width], solved[..., width:]  # u = own - correction S
    weights, read = (q @ k.mT) * decay, since.exp() * q
    last = since[..., -1:, :]
    keys = (last - since).exp() * k

    def step(state: Tensor, value: Tensor, corrected: Tensor, *chunk: Tensor) -> tuple[Tensor, Tensor]:
        weight, query, factor, key = chunk
        written = value - corrected @ state
        return factor * state + key.mT @ written, query @ state + weight @ written

    state = k.new_zeros(*k.shape[:2], k.shape[-1], width)
    out = over_chunks(step, state, own, correction, weights, read, last.exp(), keys)
    return out.flatten(2, 3)[:, :, :tokens]


def inverse(a: Tensor) -> Tensor:
    """Returns inverses of I + A for what A (..., T, T) has below its diagonal, with T a power of two.

    By halves, [[P, 0], [A, R]]^-1 = [[P^-1, 0], [-R^-1 A P^-1, R^-1]]. These are products alone, which ONNX has, and as
    exact as `torch.linalg.solve_triangular`. The product of all I + (-A)^(2^i) is the same on paper, but powers of A
    grow to 10^9 where keys are alike.
    """
    if a.requires_grad and supports_custom_autograd(a):
        return _Inverse.apply(a)  # type: ignore[no-any-return]
    return _by_halves(a)


def _by_halves(a: Tensor) -> Tensor:
    half = a.shape[-1] // 2
    if not half:
        return torch.ones_like(a)
    first, second = _by_halves(torch.stack([a[..., :half, :half], a[..., half:, half:]]))
    below = -second @ a[..., half:, :half] @ first
    return torch.cat([F.pad(first, (0, half)), torch.cat([below, second], -1)], -2)


class _Inverse(torch.autograd.Function):
    """`inverse`, whose gradient is two products: -X^T G X^T of the inverse X."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        x = _by_halves(a)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        (x,) = ctx.saved_tensors
        gradient: Tensor = -(x.mT @ gradients[0] @ x.mT).tril(-1)
        return gradient
