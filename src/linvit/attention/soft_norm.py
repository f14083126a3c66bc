"""Normalised softmax-free attention (SOFT++): `o = P D^-1/2 Y D^-1/2 P^T v + conv(v)`, `Y = A^-1`, `D = diag(A 1)`.

`P = G(q, l)` and `A = G(l, l)` are the Gaussian kernels `G(a, b) = exp(-||a - b||^2 / (2 sqrt(d)))` of SOFT between
queries and m landmarks, `k = q`. The rows of A sum to at most m, and dividing the inverse by them keeps its spectral
norm, and with it that of the whole matrix, from growing like the square of m.

Paper: Lu et al. 2024, "Softmax-free Linear Transformers" (IJCV), Sec. 3 and Prop. 6.
Cost: `h m (R^2 dk^2 + (N + m) dk + (2 N + m) d + (2 T + 1) m^2) + s^2 P C` MACs for T steps, linear in N if m is fixed.
Rank: m (N with the convolution).

Paper and code differ, and the default here is the code: `D = diag(A 1)` scales the inverse of A as it is, not of a
normalised A (Eq. 17 has another D, whose size does not fit), and backtracking stops at 1.01 (`backtrack_tol=1`: the
paper) after 10 steps (`max_backtrack`). One thing is not the code's: alpha and its backtracking are those of every
image and head alone; `alpha_scope="batch"` is the reference, where images depend on their batch.
"""

from typing import Any, Literal

from torch import Tensor

from linvit.attention.base import Grid
from linvit.attention.soft import SoftAttention


class SoftNormAttention(SoftAttention):
    """Softmax-free attention with a symmetrically normalised inverse, O(N m d).

    Args:
        newton_alpha: a in `alpha = a / max_row_sum^2`, the factor of its start `Y0 = alpha A`. With 2 an eigenvalue
            equal to the largest row sum (one or two landmarks, or all far apart) is inverted to 0, where SOFT's 1.8
            inverts it.
        max_backtrack: Backtracking steps at most; 0 is none.
        ridge: Added to the diagonal of the landmarks' kernel before the inversion, not in D.
        inverse_backward: "autograd": the gradient of the iteration, alpha included (the reference); "analytic": the
            gradient of an exact inverse at the iterate, which stores nothing of the iteration.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        newton_alpha: float = 2.0,
        max_backtrack: int = 10,
        ridge: float = 0.0,
        inverse_backward: Literal["analytic", "autograd"] = "autograd",
        **options: Any,
    ) -> None:
        super().__init__(
            dim,
            num_heads,
            grid,
            newton_alpha=newton_alpha,
            max_backtrack=max_backtrack,
            ridge=ridge,
            inverse_backward=inverse_backward,
            **options,
        )

    def parts(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
        """`P` (B, h, N, m), `D^-1/2 Y D^-1/2` (B, h, m, m) and the keys' `P` (B, h, M, m)."""
        left, kernel, right = self.kernels(q, None if self.tie_qk else k, grid)
        scale = kernel.sum(-1, keepdim=True).rsqrt()  # (B, h, m, 1); the sums are at least 1
        return left, scale * self.inverse(kernel) * scale.mT, right
