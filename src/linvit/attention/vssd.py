"""Non-causal state space duality (VSSD): `o = q (k^T (a * v)) + D v` with a weight a of each token and head.

`a_t = softplus(dt_t) exp(A_log)`, where dt is a linear map of the layer's input x, so a token determines its weight for
all others; there is no decay between tokens, no normaliser, and no scale. Before, q, k and v are convolved
depthwise, 3 x 3, and go through SiLU. `groups` of heads share q and k: head i has those of group i mod g. The host puts
a LayerNorm behind, and multiplies by a linear map of x without an activation.

Paper: Shi et al. 2024, "VSSD: Vision Mamba with Non-Causal State Space Duality"; follows the authors' code, where q, k,
v are the C, B, x of Mamba-2, whose gated RMSNorm and neighbouring heads of a group they leave.
Cost: `2 N dk e C + 9 P (e C + 2 g dk) + N C h` MACs with e C channels of v, and g groups of dk of q and k. Rank: N for
the convolved values, dk without D v, which is diagonal. Rows do not sum to 1, and entries have either sign. The state
is dk numbers per channel of v.

The output grows with N and with the cube of the input, and may leave the range of float16. Every token takes part in
the sum; the convolution passes the prefix by.
"""

import torch
from timm.layers import trunc_normal_
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.base import Attention, Grid
from linvit.attention.declarations import Facts, Gate, Host, OutNorm
from linvit.attention.ops.functional import initial_steps, join_heads, split_heads
from linvit.attention.ops.linear import key_product
from linvit.attention.ops.value_conv import convolve_as_given, depthwise_conv
from linvit.errors import UserError, check_number


class VSSDAttention(Attention):
    """Linear attention without a normaliser, in which tokens weigh themselves, O(N d^2).

    The defaults leave the projections of softmax attention as they are; the paper's models have `expand: 2`,
    `d_state: 64` and `groups: 1`.

    Args:
        expand: Channels of the values, and of the norm and gate behind, per channel of the layer, e.
        d_state: Channels n of q and k per group; None is `key_dim`.
        groups: Heads of q and k, a divisor of h; None is h.
        positive: False takes the negative of a, as the duality has it; then D v and the rest differ in sign.
        out_norm: The norm behind, "ln" or "none".
        gate: The gate behind that.
    """

    host = Host(input=True)
    facts = Facts(complexity="O(N)", same_grid=True, linear_in_values=False, matrix_is_exact=False, packs=True)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        key_dim: int | None = None,
        expand: int = 1,
        d_state: int | None = None,
        groups: int | None = None,
        positive: bool = True,
        out_norm: OutNorm = "ln",
        gate: Gate = "linear",
    ) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        check_number("expand", expand, at_least=1, whole=True)
        if d_state is not None:
            check_number("d_state", d_state, at_least=1, whole=True)
            self.set_key_dim(d_state, option=f"d_state={d_state}", key_dim=key_dim)
        if groups is not None:
            check_number("groups", groups, at_least=1, whole=True)
            if num_heads % groups:
                raise UserError(f"groups must divide the {num_heads} heads; got {groups}")
            self.key_heads = groups
        self.dim = self.out_dim = expand * dim
        self.head_dim *= expand
        self.positive = positive
        self.declare(norm=out_norm, gate=gate, state_size=self.key_dim * self.dim)
        self.conv2d = depthwise_conv(self.dim + 2 * self.key_heads * self.key_dim, 3)
        self.dt = nn.Linear(dim, num_heads)
        trunc_normal_(self.dt.weight, std=0.02)
        self.dt.bias.data = initial_steps(num_heads)
        self.A_log = nn.Parameter(torch.empty(num_heads).uniform_(1, 16).log())
        self.D = nn.Parameter(torch.ones(num_heads))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, x: Tensor | None = None) -> Tensor:
        """(B, g, N, n), (B, g, N, n), (B, h, N, e d) and the layer's input x (B, N, C) -> (B, h, N, e d)."""
        if x is None:
            raise UserError("vssd makes the weights of its tokens from the layer's input; pass it as x=")
        return self.core(q, k, v, grid, x)

    def core(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, x: Tensor) -> Tensor:
        """Returns the attention of q, k and v that are convolved first."""
        return self.mixed(*self._convolved(join_heads(q), join_heads(k), join_heads(v), grid), x, grid)

    def mixed(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, grid: Grid | None = None) -> Tensor:
        """Returns the output of convolved q, k and v, and of the layer's input."""
        # Heads of a group side by side: (B, h, N, p) -> (B, g, N, h/g p).
        wide = (self._weights(x.to(v.dtype)) * v).unflatten(1, (-1, self.key_heads)).permute(0, 2, 3, 1, 4)
        out = key_product(q, k, wide.flatten(3), grid).unflatten(3, (-1, self.head_dim))
        mixed: Tensor = out.permute(0, 3, 1, 2, 4).flatten(1, 2)
        return mixed + self.D.to(v.dtype)[:, None, None] * v

    def _weights(self, x: Tensor) -> Tensor:
        """Returns the weights a of the tokens, (B, h, N, 1), in the precision of x."""
        dt = F.linear(x, self.dt.weight.to(x.dtype), self.dt.bias.to(x.dtype))
        rates = self.A_log.to(x.dtype).exp() * (1 if self.positive else -1)
        # Contiguous, since torch.compile expects softplus's gradient to be laid out like its input.
        return (F.softplus(dt.mT.contiguous()) * rates[:, None]).unsqueeze(-1)

    def _convolved(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
        """Returns tokens q, k and v (B, N, channels of all heads), convolved and after SiLU, by heads."""
        joined = torch.cat([v, k, q], dim=-1)  # in the order of the reference
        mixed = F.silu(grid.map_patches(lambda plane: convolve_as_given(self.conv2d, plane), joined))
        width = self.key_heads * self.key_dim
        v, k, q = mixed.split([self.dim, width, width], -1)
        return split_heads(q, self.key_heads), split_heads(k, self.key_heads), split_heads(v, self.num_heads)

    def attention_matrix(self, q: Tensor, k: Tensor, v: Tensor | None, grid: Grid, x: Tensor) -> Tensor:
        """Returns the matrix (B, h, N, N) that acts on the convolved values, D on its diagonal."""
        nothing = q.new_zeros(len(q), q.shape[2], self.dim)
        q, k, _ = self._convolved(join_heads(q), join_heads(k), nothing, grid)
        shared = (q @ k.mT).repeat(1, self.num_heads // self.key_heads, 1, 1)  # head i has group i mod g
        return shared * self._weights(x).mT + self.D[:, None, None] * torch.eye(q.shape[2]).to(q)
