"""LION: `o_i = sum_j A_ij v_j / sum_j A_ij`, linear attention whose weights decay with the distance in the sequence.

`o_i = sum_j A_ij v_j / (sum_j A_ij + 1e-6)` with `A_ij = phi(q_i) phi(k_j) / sqrt(d) M_ij` and
`phi(x) = (SiLU(x) + 1/2) / ||SiLU(x) + 1/2||`. M_ij is the product of factors a over the tokens from the key
(included) to the query (excluded), in either direction, and 1 on the diagonal. With `decay: fixed` a head has one
factor, `a = sigmoid(a_h)`, so `M_ij = a^|i-j|`; with `selective` each token has one, `a_t = 1 - sigmoid(W x_t + b)`,
and prefix tokens have 1. With `order: S` M is the mean of two masks, of the tokens row by row and column by column,
every second one backwards.

Paper: Afzal et al. 2025, "Linear Attention for Efficient Bidirectional Sequence Modeling". Follows the authors' code of
LION-D and LION-S, in which the gate gets no gradient (a defect); they take square grids and one class token.
LION-LIT is `linear` with `eps` 1e-6 sqrt(d).
Cost: `o (S T (h dk + C + h) + 4 S dk (C + h)) + g N C h` MACs in o orders, with N tokens padded to S in chunks of
T = 64, and g = o with `selective`, else 0. Rank: up to N. Rows sum to 1, and all weights are positive.
"""

from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.base import Attention, Grid
from linvit.attention.declarations import Facts
from linvit.attention.ops.functional import is_exporting, l2_norm, linear_as_given
from linvit.attention.ops.orders import boustrophedon, chunked, over_chunks
from linvit.errors import UserError, check_choice

CHUNK, EPS = 64, 1e-6


class LionAttention(Attention):
    """Linear attention with weights that decay along one or two orders of the tokens, O(N d^2).

    Args:
        decay: "fixed", one factor of each head, or "selective", one of each token and head.
        order: "S": two orders, by rows and by columns, every second backwards; "normal": row by row.
    """

    facts = Facts(complexity="O(N)", same_grid=True, fades=True)
    exports_loop = True  # over chunks

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        key_dim: int | None = None,
        decay: Literal["fixed", "selective"] = "fixed",
        order: Literal["S", "normal"] = "S",
    ) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        check_choice("decay", decay, ["fixed", "selective"])
        check_choice("order", order, ["S", "normal"])
        self.selective, self.orders = decay == "selective", 2 if order == "S" else 1
        self.declare(input=self.selective, state_size=2 * self.orders * self.key_dim * (dim + num_heads))
        if self.selective:
            self.gates = nn.ModuleList(_gate(dim, num_heads) for _ in range(self.orders))
        else:
            self.factors_of_heads = nn.ParameterList(torch.randn(num_heads) for _ in range(self.orders))

    def core(
        self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, x: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """(B, h, N, dk) twice, (B, h, N, d), and with `selective` the layer's input (B, N, C) -> (B, h, N, d)."""
        if not self.selective:
            logits = [factor.expand(1, q.shape[2], -1).mT for factor in self.factors_of_heads]
        elif x is None:
            raise UserError("lion with decay=selective makes its factors from the layer's input; pass it as x=")
        else:
            logits = [-linear_as_given(cast("nn.Linear", gate), x).mT for gate in self.gates]
        return self.mixed(q, k, v, grid, torch.stack(logits), mask)

    def mixed(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, logits: Tensor, mask: Tensor | None = None) -> Tensor:
        """Returns the formula, with factors a = sigmoid(logits), (orders, B or 1, h, N)."""
        left_out = None if mask is None else ~mask[:, None, :, None]
        queries, keys = features(q), features(k)
        logs = F.logsigmoid(logits.to(v.dtype)).unsqueeze(-1)
        if self.selective and grid.num_prefix:
            logs = torch.cat([torch.zeros_like(logs[..., : grid.num_prefix, :]), logs[..., grid.num_prefix :, :]], -2)
        if left_out is not None:
            keys = keys.masked_fill(left_out, 0)
            logs = logs.expand(-1, len(q), -1, -1, -1).masked_fill(left_out, 0)
        ones = torch.cat([v, torch.ones_like(v[..., :1])], -1)  # whose last channel becomes the denominator
        if self.orders == 1:
            sums = decayed_sums(queries, keys, ones, logs[0])
        else:
            sums = torch.zeros_like(ones)
            for log, by_columns in zip(logs, (False, True), strict=True):
                order = boustrophedon(grid, q.device, by_columns)
                read = decayed_sums(*(x.index_select(2, order) for x in (queries, keys, ones, log)))
                sums = sums + read.index_select(2, order.argsort()) / 2
        sums = self.key_dim**-0.5 * sums
        out: Tensor = sums[..., :-1] / (sums[..., -1:] + EPS)
        return out


def _gate(dim: int, num_heads: int) -> nn.Linear:
    """Returns the linear layer of the factors, which begin at 1/2."""
    gate = nn.Linear(dim, num_heads)
    nn.init.trunc_normal_(gate.weight, std=0.02)
    nn.init.zeros_(gate.bias)
    return gate


def features(x: Tensor) -> Tensor:
    """Returns the feature map: positive, of length 1."""
    y = F.silu(x) + 0.5
    return y / l2_norm(y)


def decayed_sums(q: Tensor, k: Tensor, v: Tensor, log: Tensor) -> Tensor:
    """`sum_j (q_i k_j) M_ij v_j` in chunks, (B, h, N, d); a chunk's own tokens are read in both directions at once.

    Args:
        q: Query features (B, h, N, dk).
        k: Key features (B, h, N, dk).
        v: Values (B, h, N, d).
        log: Logarithms of the factors (B or 1, h, N, 1), at most 0.
    """
    tokens = q.shape[2]
    length = CHUNK if is_exporting() else min(CHUNK, tokens)
    q, k, v, log = (chunked(x, length) for x in (q, k, v, log))  # (B, h, n, T, ...)
    upto = log.cumsum(-2)  # the sum from the start of the chunk, with the token itself
    until, whole = upto - log, log.sum(-2, keepdim=True)  # without it, and that of the chunk
    lower = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    between = torch.where(lower, until - until.mT, upto.mT - upto)
    out: Tensor = ((q @ k.mT) * between.exp()) @ v
    if is_exporting() or q.shape[2] > 1:
        ahead, behind = k * (whole - until).exp(), k * upto.exp()  # decayed to the end of their chunk, and its start
        written = torch.cat([ahead.mT @ v, (behind.mT @ v).flip(2)], 1)  # (B, 2 h, n, dk, d)
        factors, start = torch.cat([whole, whole.flip(2)], 1).exp(), torch.zeros_like(written[:, :, 0])
        states = over_chunks(lambda s, factor, sums: (torch.addcmul(sums, factor, s), s), start, factors, written)
        before, after = states.chunk(2, 1)
        read = torch.cat([q * until.exp(), q * (whole - upto).exp()], -1)
        out = out + read @ torch.cat([before, after.flip(2)], -2)
    return out.flatten(2, 3)[:, :, :tokens]
