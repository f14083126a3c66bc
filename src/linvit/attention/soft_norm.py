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

from typing import Literal

from torch import Tensor

from linvit.attention.base import Attention, Grid
from linvit.attention.ops.gaussian import GaussianKernels, check_tied, paper_conv_size, paper_ratio
from linvit.attention.ops.head_conv import convolve_heads, head_conv
from linvit.attention.ops.newton import NewtonInverse
from linvit.attention.ops.precision import full_precision


class SoftNormAttention(Attention):
    """Softmax-free attention with a symmetrically normalised inverse, O(N m d).

    Args:
        dim: Channels C over all heads.
        num_heads: Heads h.
        grid: Nominal grid; decides `ratio` and `conv_size` where they are None.
        key_dim: Channels of q per head; None means C / h.
        landmarks: "conv": a convolution of R x R patch queries, shared by the heads; "avgpool": their mean; "random":
            as many patch queries, drawn anew in every training step and fixed in evaluation.
        ratio: R, patches per landmark along each axis; 1 makes every patch one. Rows and columns that fill no window
            make no landmark, and along an axis shorter than R the window is cut to it. None: the largest power of two
            that leaves 49 landmarks of the nominal grid, which is the paper's 8, 4, 2, 1 on its stages (56 x 56 to
            7 x 7) and keeps the cost linear. Give a number to carry weights to an image size of another ratio.
        landmark_norm: LayerNorm and GELU on the landmarks (the reference); False is the paper.
        newton_iters: Steps of Newton's iteration.
        newton_alpha: a in `alpha = a / max_row_sum^2`, the factor of its start `Y0 = alpha A`. With 2 an
            eigenvalue equal to the largest row sum (one or two landmarks, or all far apart) is inverted to 0, where
            SOFT's 1.8 inverts it.
        newton_beta: Backtracking multiplies alpha by this.
        max_backtrack: Backtracking steps at most; 0 is none.
        backtrack_tol: Backtracking goes on while the largest column sum of `|I - A Y0|` exceeds this.
        alpha_scope: "head": alpha for every image and head; "batch": one for all, which couples the images of a batch
            (the reference).
        ridge: Added to the diagonal of the landmarks' kernel before the inversion, not in D; SOFT's is 0.01.
        conv_size: Side s of the kernel of the values' convolution, odd; 0 is none. One kernel per head, shared by its
            channels; it reads and writes patch tokens only. None: the paper's 9, 5 and 3 for R of at least 8, at least
            4, and less.
        tie_qk: Keys are the queries. False gives keys a projection of their own and allows spatial reduction:
            `G(q, l) Y G(l, k)`, no longer symmetric.
        inverse_backward: "autograd": the gradient of the iteration, alpha included (the reference); "analytic": the
            gradient of an exact inverse at the iterate, nothing kept of the iteration.
        inverse: "newton", or "solve" for the exact inverse. Landmarks that coincide have none: there "solve" is near
            the pseudo-inverse, to a few percent, which a ridge improves.
    """

    projections: Literal["qkv", "qv", "kv"] = "qv"
    complexity = "O(N)"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        key_dim: int | None = None,
        landmarks: Literal["conv", "avgpool", "random"] = "conv",
        ratio: int | None = None,
        landmark_norm: bool = True,
        newton_iters: int = 20,
        newton_alpha: float = 2.0,
        newton_beta: float = 0.5,
        max_backtrack: int = 10,
        backtrack_tol: float = 1.01,
        alpha_scope: Literal["head", "batch"] = "head",
        ridge: float = 0.0,
        conv_size: int | None = None,
        tie_qk: bool = True,
        inverse_backward: Literal["analytic", "autograd"] = "autograd",
        inverse: Literal["newton", "solve"] = "newton",
    ) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        self.tie_qk = tie_qk
        if not tie_qk:
            self.projections = "qkv"
        check_tied(grid, tie_qk)
        self.kernels = GaussianKernels(
            self.key_dim,
            landmarks=landmarks,
            ratio=paper_ratio(grid.size) if ratio is None else ratio,
            landmark_norm=landmark_norm,
        )
        self.inverse = NewtonInverse(
            method=inverse,
            iters=newton_iters,
            alpha=newton_alpha,
            ridge=ridge,
            beta=newton_beta,
            max_backtrack=max_backtrack,
            backtrack_tol=backtrack_tol,
            alpha_scope=alpha_scope,
            backward=inverse_backward,
        )
        self.conv = head_conv(num_heads, paper_conv_size(self.kernels.ratio) if conv_size is None else conv_size)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """(B, h, N, dk), (B, h, M, dk), (B, h, M, d) -> (B, h, N, d)."""
        check_tied(grid, self.tie_qk)
        out = self._global(q, k, v, grid)
        return out if self.conv is None else out + convolve_heads(self.conv, v, grid)

    @full_precision
    def _global(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """`P (D^-1/2 Y D^-1/2 (P^T v))`."""
        left, middle, right = self.parts(q, k, grid)
        return left @ (middle @ (right.mT @ v))

    def parts(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
        """`P` (B, h, N, m), `D^-1/2 Y D^-1/2` (B, h, m, m) and the keys' `P` (B, h, M, m)."""
        left, kernel, right = self.kernels(q, None if self.tie_qk else k, grid)
        scale = kernel.sum(-1, keepdim=True).rsqrt()  # (B, h, m, 1); the sums are at least 1
        return left, scale * self.inverse(kernel) * scale.mT, right

    def factors(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor] | None:
        """`P` and `P D^-1/2 Y^T D^-1/2`; None with the convolution."""
        if self.conv is not None:
            return None
        left, middle, right = self.parts(q, k, grid)
        return left, right @ middle.mT

    def rank_bound(self, grid: Grid) -> int:
        """The number of landmarks without the convolution, and never more than the tokens."""
        tokens = super().rank_bound(grid)
        return tokens if self.conv is not None else min(tokens, self.kernels.count(grid))
