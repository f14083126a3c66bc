"""Parts of SOFT and SOFT++: Gaussian kernels of landmarks, and the inverse of the kernel between them.

`G(q, k) ~ G(q, l) G(l, l)^-1 G(l, k)` with `G(a, b) = exp(-||a - b||^2 / 2)` on queries and keys divided by d^(1/4),
that is `exp(-||q - k||^2 / (2 sqrt(d)))`. The landmarks l come from the patch queries.

The inverse is that of Newton's iteration, `Y <- 2 Y - Y A Y` from `Y0 = alpha A`: matrix products only, so it runs
batched on any device. `I - A Y` squares in every step, so a small error is gone in a few; but an eigenvalue l of A
takes about log2(1 / (alpha l^2)) steps to get that far. With similar landmarks the iteration is far from the inverse
after 20 steps, and the papers trained with the iterate.

Paper: Lu et al. 2021, "SOFT: Softmax-free Transformer with Linear Complexity", Algorithms 1 and 2.
Cost: N C d + N m C + m^2 C MACs (N C d for the convolution of the landmarks), and 2 T m^3 for T steps.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.base import Grid
from linvit.errors import UserError, check_number

LANDMARKS = 49  # the paper's number in every stage


def gaussian_kernel(a: Tensor, b: Tensor) -> Tensor:
    """`exp(-||a_i - b_j||^2 / 2)`: (..., n, d), (..., m, d) -> (..., n, m), without the n m differences."""
    exponents = (a @ b.mT).add_(_minus_half_square(a)).add_(_minus_half_square(b).mT)
    exponents.detach().clamp_max_(0)  # rounding may leave some slightly above 0; the gradient is unchanged there
    return exponents.exp_()


def _minus_half_square(x: Tensor) -> Tensor:
    """`-||x_i||^2 / 2`, (..., n, d) -> (..., n, 1)."""
    return x.square().sum(-1, keepdim=True) * -0.5


def landmark_grid(size: tuple[int, int], ratio: int) -> tuple[int, int]:
    """Returns whole windows of R x R patches on a grid; an axis shorter than R is one window."""
    return max(1, size[0] // ratio), max(1, size[1] // ratio)


def paper_ratio(size: tuple[int, int]) -> int:
    """Returns the largest power of two for 49 landmarks, or 1: the paper's 8, 4, 2 on 56 x 56, 28 x 28, 14 x 14."""
    ratio = 1
    while math.prod(landmark_grid(size, 2 * ratio)) >= LANDMARKS:
        ratio *= 2
    return ratio


def paper_conv_size(ratio: int) -> int:
    """Returns the side of the kernel on the values that the paper pairs with a ratio: 9, 5, 3 with 8, 4, 2."""
    return 9 if ratio >= 8 else 5 if ratio >= 4 else 3


def check_tied(grid: Grid, tie_qk: bool) -> None:
    """Raises a `UserError` if the keys are the queries but have another grid."""
    if tie_qk and grid.keys_size != grid.size:
        (height, width), (keys_height, keys_width) = grid.size, grid.keys_size
        raise UserError(
            f"keys are the queries here and share their grid; got {height}x{width} for the queries and "
            f"{keys_height}x{keys_width} for the keys; use no spatial reduction, or tie_qk=False"
        )


class GaussianKernels(nn.Module):
    """Gaussian kernels between queries, landmarks and keys."""

    def __init__(
        self, key_dim: int, *, landmarks: Literal["conv", "avgpool", "random"], ratio: int, landmark_norm: bool
    ) -> None:
        super().__init__()
        check_number("ratio", ratio, at_least=1, whole=True, note=" (1: every patch makes a landmark)")
        self.key_dim = key_dim
        self.landmarks = landmarks
        self.ratio = ratio
        self.conv = nn.Conv2d(key_dim, key_dim, ratio, stride=ratio, bias=False) if landmarks == "conv" else None
        self.norm = nn.LayerNorm(key_dim) if landmark_norm else None

    def forward(self, q: Tensor, k: Tensor | None, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
        """(B, h, N, d), (B, h, M, d) -> `G(q, l)` (B, h, N, m), `G(l, l)` (B, h, m, m), `G(k, l)` (B, h, M, m).

        Without k the keys are the queries. In the precision of q, not of the parameters.
        """
        scale = self.key_dim**-0.25
        q = q * scale
        landmarks = self.choose(q, grid)
        left = gaussian_kernel(q, landmarks)
        right = left if k is None else gaussian_kernel(k * scale, landmarks)
        return left, gaussian_kernel(landmarks, landmarks), right

    def choose(self, q: Tensor, grid: Grid) -> Tensor:
        """Returns the landmarks (B, h, m, d) of scaled queries (B, h, N, d). Prefix tokens make none."""
        patches = q[:, :, grid.num_prefix :]
        landmarks = self._random(patches, grid) if self.landmarks == "random" else self._merged(patches, grid)
        if self.norm is None:
            return landmarks
        weight, bias = self.norm.weight.to(q.dtype), self.norm.bias.to(q.dtype)
        landmarks = F.layer_norm(landmarks, (self.key_dim,), weight, bias, self.norm.eps)
        return F.gelu(landmarks)

    def _merged(self, patches: Tensor, grid: Grid) -> Tensor:
        """Returns one landmark per window."""
        plane = patches.flatten(0, 1).mT.unflatten(2, grid.size)  # (B*h, d, H, W)
        height, width = grid.size
        if self.conv is None:
            plane = F.avg_pool2d(plane, (min(self.ratio, height), min(self.ratio, width)))
        else:
            missing = max(0, self.ratio - height), max(0, self.ratio - width)
            if any(missing):  # zeros there, so that only the kernel's part on the grid counts
                plane = F.pad(plane, (0, missing[1], 0, missing[0]))
            plane = F.conv2d(plane, self.conv.weight.to(plane.dtype), stride=self.ratio)
        landmarks: Tensor = plane.flatten(2).mT.unflatten(0, patches.shape[:2])  # (B, h, m, d)
        return landmarks

    def _random(self, patches: Tensor, grid: Grid) -> Tensor:
        """Returns patches at random, the same ones for every image and head."""
        tokens = torch.arange(patches.shape[2], device=patches.device)
        scattered = tokens * 40503 % 2**16  # multiplicative hashing by the golden ratio
        order = torch.rand(tokens.shape, device=patches.device) if self.training else scattered
        return patches[:, :, order.argsort()[: self.count(grid)]]

    def count(self, grid: Grid) -> int:
        """Returns the number m of landmarks on a grid."""
        return math.prod(landmark_grid(grid.size, self.ratio))


@dataclass(frozen=True, kw_only=True)
class NewtonInverse:
    """Maps kernel matrices A (B, h, m, m) to approximate inverses of the same shape."""

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
            # Equal landmarks make A singular, and rounding decides what similar ones give: so the diagonal gets m
            # roundings of the largest row sum or more, below which an eigenvalue counts as 0 in a pseudo-inverse.
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
        """Returns the largest row (and column) sum: (B, h, 1, 1), or (1, 1, 1, 1) for the whole batch."""
        sums = matrix.sum(-1, keepdim=True)
        dims = (-2, -1) if self.alpha_scope == "head" else tuple(range(matrix.ndim))
        return sums.amax(dims, keepdim=True)
