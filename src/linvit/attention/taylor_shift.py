"""TaylorShift: `o_n = sum_m w_nm v_m / sum_m w_nm` with `w = a x^2 + b x + c`, `x_nm = t_h q_n.k_m` of unit vectors.

The exponential by its Taylor expansion of second order, (a, b, c) = (1/2, 1, 1), with a learnt temperature t per head.
It is linear attention with the `r = (d + 1)(d + 2) / 2` features `[x (x) x, x, 1]` of degree 2 at most: products of two
channels are taken once, which the reference takes twice. Up to r tokens the matrix of all pairs costs less.

Paper: Nauen et al. 2024, "TaylorShift: Shifting the Complexity of Self-Attention from Squared to Linear (and Back)"
(ICPR). Follows the authors' code. `taylor` is another mechanism, of first order.
Cost: `((N + M) C + N h) (dk + 1) (dk + 2) / 2` MACs in the form "efficient", N M (h dk + C) in the form "direct". Rank:
at most r. Rows sum to 1. At t = 1 weights differ by a factor of 5 at most: sharp rows need a larger t, which is learnt.

The reference's direct form with `output_normalized` multiplies v in place and cannot be trained; here it can.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from linvit.attention.base import Attention, Grid
from linvit.attention.declarations import Facts
from linvit.attention.ops.activations import normalize, of_both
from linvit.attention.ops.functional import is_exporting, upcast
from linvit.attention.ops.linear import linear_attention, linear_factors
from linvit.errors import UserError, check_number


class TaylorShiftAttention(Attention):
    """Attention by the second-order Taylor expansion of softmax, O(N d^3), or O(N^2 d) where that is less.

    Args:
        a: Factor of `x^2`, above 0.
        b: Factor of x.
        c: Constant, at least `b^2 / 4 a`, so that no weight is negative.
        normalize_input: Bring q and k to length one and learn a temperature per head. Without it x is `q.k`.
        output_normalized: Multiply the output by `sqrt(N / d)`.
        form: "efficient", "direct" or "auto", the cheaper one on the grid at hand.
    """

    facts = Facts(complexity="O(N)", equivariant=True)
    precision = "mixed"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        key_dim: int | None = None,
        a: float = 0.5,
        b: float = 1.0,
        c: float = 1.0,
        normalize_input: bool = True,
        output_normalized: bool = False,
        form: Literal["auto", "direct", "efficient"] = "auto",
    ) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        check_number("a", a, above=0)
        check_number("b", b)
        check_number("c", c, above=0)
        if 4 * a * c < b * b:
            raise UserError(
                f"a={a}, b={b}, c={c} give negative weights; take c of at least b^2 / 4 a = {b * b / 4 / a:g}"
            )
        self.a, self.b, self.c = a, b, c
        self.temperature = nn.Parameter(torch.ones(1, num_heads, 1, 1)) if normalize_input else None
        self.output_normalized = output_normalized
        self.form = form
        self.num_features = (self.key_dim + 1) * (self.key_dim + 2) // 2
        self.declare(max_rank=self.num_features, complexity="O(N^2)" if form == "direct" else "O(N)")

    def core(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, mask: Tensor | None = None) -> Tensor:
        """(B, h, N, dk), (B, h, M, dk), (B, h, M, d) -> (B, h, N, d); keys outside `mask` (B, M) take no part."""
        q, k = self._scaled(q, k)
        if self._is_direct(grid):  # in at least float32
            x = q @ k.mT
            weights = (self.a * x + self.b) * x + self.c
            if mask is not None:
                weights = weights * mask[:, None, None]
            out = (weights @ v.to(weights.dtype)) / weights.sum(-1, keepdim=True)
        else:
            keys = self._features(k, v.dtype)
            if mask is not None:
                keys = keys * mask[:, None, :, None]
            out = linear_attention(self._features(q, v.dtype, weighted=True), keys, v, 0.0)
        return out * (q.shape[-2] / v.shape[-1]) ** 0.5 if self.output_normalized else out

    def _is_direct(self, grid: Grid) -> bool:
        """Returns True if all pairs cost less than features, on the call's grid, or in export on the nominal grid."""
        if self.form != "auto":
            return self.form == "direct"
        grid = self.grid if is_exporting() else grid
        n, m = grid.num_queries, grid.num_keys
        return 2 * n * m < (n + m) * self.num_features

    def _scaled(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys whose products are x, in at least float32."""
        if self.temperature is None:
            return upcast(q), upcast(k)
        q, k = of_both(lambda x: normalize(upcast(x), 1e-12), q, k)
        return q * self.temperature.to(q.dtype), k

    def _features(self, x: Tensor, dtype: torch.dtype, weighted: bool = False) -> Tensor:
        """`[x_i x_j for i <= j, x, 1]` in some order, (..., r), times the factors of the expansion if `weighted`.

        x is rounded to `dtype` for each of its parts in the products, so that their gradients add up in its precision.
        """
        d, own, twice = x.shape[-1], *((self.a, 2 * self.a) if weighted else (1.0, 1.0))
        here, there, y = (x.to(dtype) for _ in range(3))
        moved = torch.cat([there, there[..., : d // 2]], -1).unfold(-1, d, 1)  # by 0, 1, ... channels
        products = [own * y.square(), (twice * here[..., None, :] * moved[..., 1 : (d + 1) // 2, :]).flatten(-2)]
        if d % 2 == 0:  # half around, where each product comes twice
            products.append(twice * y[..., : d // 2] * y[..., d // 2 :])
        rest = (self.b, self.c) if weighted else (1.0, 1.0)
        return torch.cat([*products, rest[0] * y, torch.full_like(y[..., :1], rest[1])], -1)

    def factors(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """`diag(1 / (Q K^T 1)) Q`, and `K`."""
        q, k = self._scaled(q, k)
        left, right = linear_factors(self._features(q, q.dtype, weighted=True), self._features(k, k.dtype), 0.0)
        return left * (q.shape[-2] / self.head_dim) ** 0.5 if self.output_normalized else left, right
