"""Inverse of a symmetric positive matrix by Newton's iteration: `Y <- 2 Y - Y A Y` from `Y0 = alpha A`.

Matrix products only, so it runs batched on any device. `I - A Y` squares in every step, so a small error is gone in a
few; but an eigenvalue l of A takes about log2(1 / (alpha l^2)) steps to get that far. With similar landmarks the
iteration is far from the inverse after 20 steps, and what the papers trained is the iterate.

Paper: Lu et al. 2021, "SOFT: Softmax-free Transformer with Linear Complexity", Algorithm 2.
Cost: 2 T m^3 MACs for T steps on an m x m matrix.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from linvit.errors import UserError, check_number


@dataclass(frozen=True, kw_only=True)
class NewtonInverse:
    """Maps kernel matrices A (B, h, m, m) to approximate inverses of the same shape.

    Attributes:
        method: "newton", or "solve" for the inverse itself. Equal landmarks make A singular, and rounding decides what
            similar ones give, so "solve" adds to the diagonal at least m roundings of the largest row sum, below which
            an eigenvalue counts as 0 in a pseudo-inverse: it is near that there.
        iters: Steps T.
        alpha: a of `alpha = a / max_row_sum(A)^2`, in (0, 2]; the row sums are those before the ridge. With a = 2 an
            eigenvalue equal to the largest row sum (A = I, or one or two landmarks) is inverted to 0.
        ridge: Added to the diagonal before the inversion.
        beta: Backtracking multiplies alpha by this ...
        max_backtrack: ... at most so many times (0: never) ...
        backtrack_tol: ... while the largest column sum of `|I - alpha A^2|` exceeds this.
        alpha_scope: "head": an alpha for every matrix; "batch": one for all matrices together, so that a sample
            depends on the others of its batch.
        backward: "analytic": `dA = -Y^T dY Y^T`, as if Y were the inverse, without storing the iteration;
            "autograd": through every step and alpha.
    """

    method: Literal["newton", "solve"]
    iters: int
    alpha: float
    ridge: float
    beta: float
    max_backtrack: int
    backtrack_tol: float
    alpha_scope: Literal["head", "batch"]
    backward: Literal["analytic", "autograd"]

    def __post_init__(self) -> None:
        check_number("newton_iters", self.iters, at_least=1, whole=True)
        check_number("newton_alpha", self.alpha, above=0, at_most=2, note=", or Newton diverges")
        check_number("ridge", self.ridge, at_least=0)
        check_number("newton_beta", self.beta, above=0, below=1)
        check_number("max_backtrack", self.max_backtrack, at_least=0, whole=True, note=" (0: no backtracking)")
        check_number("backtrack_tol", self.backtrack_tol, at_least=1, note=", which no small alpha exceeds")
        # Row sums of a Gaussian kernel are at least 1, so this bounds alpha l^2 for its eigenvalues l plus the ridge.
        if self.method == "newton" and self.alpha * (1 + self.ridge) ** 2 > 2:
            raise UserError(
                f"Newton diverges with newton_alpha={self.alpha} and ridge={self.ridge}: newton_alpha (1 + ridge)^2 is "
                f"above 2; lower newton_alpha to {2 / (1 + self.ridge) ** 2:.3g} or use a smaller ridge"
            )

    def __call__(self, kernel: Tensor) -> Tensor:
        """(B, h, m, m) -> (B, h, m, m)."""
        identity = torch.eye(kernel.shape[-1], dtype=kernel.dtype, device=kernel.device)
        if self.method == "solve":
            rounding = torch.finfo(kernel.dtype).eps * kernel.detach().sum(-1).amax(-1)  # (B, h)
            ridge = (kernel.shape[-1] * rounding).clamp_min(self.ridge)[..., None, None]
            inverse: Tensor = torch.linalg.inv_ex(kernel + ridge * identity).inverse  # never raises
            return inverse
        matrix = kernel + self.ridge * identity
        if self.backward == "autograd":
            return self._iterate(kernel, matrix, identity)
        inverse = self._iterate(kernel.detach(), matrix.detach(), identity)  # traces know no `torch.no_grad`
        # Adds 0 with the gradient of an inverse. An autograd.Function would lose its backward in torch.export.
        return inverse - inverse @ (matrix - matrix.detach()) @ inverse

    def _iterate(self, kernel: Tensor, matrix: Tensor, identity: Tensor) -> Tensor:
        alpha = self.alpha / self._largest(kernel).square()
        if self.max_backtrack:
            square = matrix.detach() @ matrix.detach()
            # A fixed number of steps, without a test in Python, is one graph and never waits for the device.
            for _ in range(self.max_backtrack):
                error = self._largest((identity - alpha * square).abs())
                alpha = torch.where(error > self.backtrack_tol, self.beta * alpha, alpha)
        inverse, matrix = (alpha * matrix).flatten(0, 1), matrix.flatten(0, 1)  # (B h, m, m)
        for _ in range(self.iters):  # 2 Y - Y A Y
            inverse = torch.baddbmm(inverse, inverse @ matrix, inverse, beta=2, alpha=-1)
        return inverse.view_as(kernel)

    def _largest(self, matrix: Tensor) -> Tensor:
        """The largest row sum, which is the largest column sum: (B, h, 1, 1), or (1, 1, 1, 1) for the whole batch."""
        sums = matrix.sum(-1, keepdim=True)
        dims = (-2, -1) if self.alpha_scope == "head" else tuple(range(matrix.ndim))
        return sums.amax(dims, keepdim=True)
