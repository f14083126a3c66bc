"""Softmax-free attention (SOFT): `o = P Y P^T v + conv(v)` with `P = G(q, l)`, `Y = (G(l, l) + ridge I)^-1`, `k = q`.

`G(a, b) = exp(-||a - b||^2 / (2 sqrt(d)))` is the Gaussian kernel and l are m landmarks made from the patch queries
(Nystrom's method). Keys are the queries, so that the matrix is symmetric and positive; its rows do not sum to 1. The
inverse is the last iterate of Newton's method, see `softmax_free.py`.

Paper: Lu et al. 2021, "SOFT: Softmax-free Transformer with Linear Complexity", Algorithms 1 and 2.
Cost: `h m (R^2 dk^2 + (N + m) dk + (2 N + m) d + 2 (T + 1) m^2) + s^2 P C` MACs for T steps, linear in N if m is fixed.
Rank: m (N with the convolution).

Paper and code differ, and the default here is the code: landmarks pass LayerNorm and GELU (`landmark_norm`), the
diagonal gets a ridge of 0.01 (`ridge=0`: none), Newton starts at 1.8 instead of 2 over the squared norm without
backtracking (`newton_alpha`, `max_backtrack`), and one convolution kernel per head is added (`conv_size=0`: none). The
code for `ratio=1`, a plain `G(l, l) v`, cannot run; here 1 is a ratio like any other.
"""

from typing import Literal, cast

from torch import Tensor, nn

from linvit.attention.base import Grid
from linvit.attention.declarations import Facts, Host
from linvit.attention.ops.softmax_free import GaussianKernels, NewtonInverse, check_tied, paper_conv_size, paper_ratio
from linvit.attention.ops.value_conv import ConvolvedAttention, convolve_heads, head_conv


class SoftAttention(ConvolvedAttention):
    """Softmax-free attention through m landmarks and Newton's inverse of their Gaussian kernel, O(N m d).

    Args:
        grid: Nominal grid; decides `ratio` and `conv_size` where they are None.
        landmarks: "conv": a convolution of R x R patch queries, shared by the heads; "avgpool": their mean; "random":
            as many patch queries, others in every training step and the same in evaluation.
        ratio: R, patches per landmark along each axis; 1 makes every patch one. Rows and columns that fill no window
            make no landmark, and along an axis shorter than R the window is as long as the axis. None: the largest
            power of two that leaves 49 landmarks of the nominal grid, which is the paper's 8, 4, 2, 1 on its stages
            (56 x 56 to 7 x 7) and keeps the cost linear. Give a number to use weights at an image size whose ratio
            would be another.
        landmark_norm: LayerNorm and GELU on the landmarks (the reference); False is the paper.
        newton_iters: Steps of Newton's iteration.
        newton_alpha: a in `alpha = a / max_row_sum^2`, the factor of its start `Y0 = alpha A`; at most 2, the paper's.
        newton_beta: Backtracking multiplies alpha by this.
        max_backtrack: Backtracking steps at most; 0 is the reference.
        backtrack_tol: Backtracking continues while the largest column sum of `|I - A Y0|` exceeds this.
        alpha_scope: "head": alpha for every image and head; "batch": one for all, which couples the images of a batch.
        ridge: Added to the diagonal of the landmarks' kernel; bounds Y by 1 / ridge. 0 is the paper.
        conv_size: Side s of the kernel of the values' convolution, odd; 0 is none. One kernel per head, shared by its
            channels; it reads and writes patch tokens only. None: the paper's 9, 5 and 3 for R of at least 8, at least
            4, and less.
        tie_qk: Keys are the queries. False gives keys a separate projection and allows spatial reduction:
            `G(q, l) Y G(l, k)`, no longer symmetric.
        inverse_backward: "analytic": the gradient of an exact inverse at the iterate (the reference), which stores
            nothing of the iteration; "autograd": the gradient of the iteration.
        inverse: "newton", or "solve" for the exact inverse. Landmarks that coincide have none: there "solve" is near
            the pseudo-inverse, to a few percent, which a ridge improves.
    """

    host = Host(project="qv")
    facts = Facts(complexity="O(N)")
    convolution = "conv"
    depthwise = False

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
        newton_alpha: float = 1.8,
        newton_beta: float = 0.5,
        max_backtrack: int = 0,
        backtrack_tol: float = 1.01,
        alpha_scope: Literal["head", "batch"] = "head",
        ridge: float = 0.01,
        conv_size: int | None = None,
        tie_qk: bool = True,
        inverse_backward: Literal["analytic", "autograd"] = "analytic",
        inverse: Literal["newton", "solve"] = "newton",
    ) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        self.tie_qk = tie_qk
        self.recompute = landmarks != "random"  # random numbers are drawn once
        if not tie_qk:
            self.declare(project="qkv")
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
        return super().forward(q, k, v, grid)

    def convolved(self, v: Tensor, grid: Grid) -> Tensor:
        """Returns the convolution of the values, (B, h, M, d) -> (B, h, N, d)."""
        return convolve_heads(cast("nn.Conv2d", self.conv), v, grid)

    def core(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """`P (Y (P^T v))`."""
        left, middle, right = self.parts(q, k, grid)
        return left @ (middle @ (right.mT @ v))

    def parts(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
        """`P` (B, h, N, m), `Y` (B, h, m, m) and the keys' `P` (B, h, M, m)."""
        left, kernel, right = self.kernels(q, None if self.tie_qk else k, grid)
        return left, self.inverse(kernel), right

    def core_factors(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """`P` and `P Y^T`."""
        left, middle, right = self.parts(q, k, grid)
        return left, right @ middle.mT

    def core_rank(self, grid: Grid) -> int:
        """Returns the number of landmarks."""
        return self.kernels.count(grid)
