"""The Gaussian kernel through landmarks l: `G(q, k) ~ G(q, l) G(l, l)^-1 G(l, k)` of SOFT and SOFT++.

`G(a, b) = exp(-||a - b||^2 / 2)` on queries and keys divided by d^(1/4), that is `exp(-||q - k||^2 / (2 sqrt(d)))`. The
landmarks l come from the patch queries.

Paper: Lu et al. 2021, "SOFT: Softmax-free Transformer with Linear Complexity", Algorithm 1.
Cost: N C d + N m C + m^2 C MACs (N C d for the convolution of the landmarks).
"""

import math
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
    exponents.detach().clamp_max_(0)  # rounding may leave some slightly above 0, where the gradient is no other
    return exponents.exp_()


def _minus_half_square(x: Tensor) -> Tensor:
    """`-||x_i||^2 / 2`, (..., n, d) -> (..., n, 1)."""
    return x.square().sum(-1, keepdim=True) * -0.5


def landmark_grid(size: tuple[int, int], ratio: int) -> tuple[int, int]:
    """Whole windows of R x R patches on a grid; an axis shorter than R is one window."""
    return max(1, size[0] // ratio), max(1, size[1] // ratio)


def paper_ratio(size: tuple[int, int]) -> int:
    """The largest power of two that leaves 49 landmarks, or 1: the paper's 8, 4, 2 on 56 x 56, 28 x 28, 14 x 14."""
    ratio = 1
    while math.prod(landmark_grid(size, 2 * ratio)) >= LANDMARKS:
        ratio *= 2
    return ratio


def paper_conv_size(ratio: int) -> int:
    """Side of the kernel on the values that the paper pairs with a ratio: 9, 5, 3 with 8, 4, 2."""
    return 9 if ratio >= 8 else 5 if ratio >= 4 else 3


def check_tied(grid: Grid, tie_qk: bool) -> None:
    """Raises a `UserError` if the keys are the queries, and are said to lie on another grid."""
    if tie_qk and grid.keys_size != grid.size:
        (height, width), (keys_height, keys_width) = grid.size, grid.keys_size
        raise UserError(
            f"keys are the queries here and share their grid; got {height}x{width} for the queries and "
            f"{keys_height}x{keys_width} for the keys; use no spatial reduction, or tie_qk=False"
        )


class GaussianKernels(nn.Module):
    """Gaussian kernels between queries, landmarks and keys.

    Args:
        key_dim: Channels d of q and k per head.
        landmarks: "conv": an R x R convolution of stride R on the patch queries, shared by the heads; "avgpool": means
            of R x R patches; "random": as many patches, others in every training step and the same in evaluation.
        ratio: R. Rows and columns that fill no window make no landmark; along an axis shorter than R the window is
            as long as the axis.
        landmark_norm: LayerNorm and GELU on the landmarks.
    """

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
        """The landmarks (B, h, m, d) of scaled queries (B, h, N, d). Prefix tokens make none."""
        patches = q[:, :, grid.num_prefix :]
        landmarks = self._random(patches, grid) if self.landmarks == "random" else self._merged(patches, grid)
        if self.norm is None:
            return landmarks
        weight, bias = self.norm.weight.to(q.dtype), self.norm.bias.to(q.dtype)
        landmarks = F.layer_norm(landmarks, (self.key_dim,), weight, bias, self.norm.eps)
        return F.gelu(landmarks)

    def _merged(self, patches: Tensor, grid: Grid) -> Tensor:
        """One landmark per window."""
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
        """Patches at random, the same ones for every image and head."""
        tokens = torch.arange(patches.shape[2], device=patches.device)
        scattered = tokens * 40503 % 2**16  # multiplicative hashing by the golden ratio
        order = torch.rand(tokens.shape, device=patches.device) if self.training else scattered
        return patches[:, :, order.argsort()[: self.count(grid)]]

    def count(self, grid: Grid) -> int:
        """Landmarks m on a grid."""
        return math.prod(landmark_grid(grid.size, self.ratio))
