"""InLine, injective linear attention: `o = (s/M) q (k^T v) + (1 - s q.mean k) mean v + conv_x(v)`.

Rows of the map are brought to a sum of 1 by subtraction, not by division, so that queries of the same direction and of
another length have other rows (`s = dk^-1/2`). The kernels of the convolution, one for each channel of each image, are
made from the mean token of the layer's input x by two linear maps within the heads.

Paper: Han et al. 2024, "Bridging the Divide: Reconsidering Softmax and Linear Attention".
Cost: `(N + M) C dk + N h dk + k^2 P C + (1 + k^2) C d` MACs with kernels of side k; the first two terms without the
convolution. Rank: N per channel (dk + 1 without the convolution).

The reference refuses keys on another grid than the queries; here they are averaged over their own number M, and their
values are brought to the grid of the queries (bilinear) for the convolution. Its program for CSWin makes the kernels of
the block's input before the norm (CSWin's `input_before_norm`).
"""

from collections.abc import Callable
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.base import Grid, Packed
from linvit.attention.declarations import Facts
from linvit.attention.ops.activations import ACTIVATIONS
from linvit.attention.ops.linear import key_mean, key_product, mean_product
from linvit.attention.ops.value_conv import ConvolvedAttention, check_side, convolve_images
from linvit.errors import UserError

FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": ACTIVATIONS["identity"],
    "relu": ACTIVATIONS["relu"],
    "leaky_relu": F.leaky_relu,
    "exp": lambda x: torch.exp(0.2 * x),
}


class InLineAttention(ConvolvedAttention):
    """Linear attention normalised by subtraction, with a convolution of the values that the image chooses, O(N d^2).

    Weights of the map may be negative.

    Args:
        feature_map: Applied to q and k, entry by entry: "identity", "relu", "leaky_relu" (0.01) or "exp", exp(0.2 x).
        residual_kernel: Side k of the convolution's kernels, odd; 0 disables the convolution.
    """

    facts = Facts(complexity="O(N)", packs=True)
    precision = "mixed"
    convolution = "residual"
    depthwise = False

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        key_dim: int | None = None,
        feature_map: Literal["identity", "relu", "leaky_relu", "exp"] = "identity",
        residual_kernel: int = 3,
    ) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        check_side("residual_kernel", residual_kernel, "3 or 5")
        self.feature_map = feature_map
        self.side = residual_kernel
        self.residual = (
            nn.Sequential(
                nn.Conv1d(dim, dim, 1, groups=num_heads),
                nn.GELU(),
                nn.Conv1d(dim, residual_kernel**2 * dim, 1, groups=num_heads),
            )
            if residual_kernel
            else None
        )
        convolved = self.residual is not None
        self.declare(max_rank=self.key_dim + 1, channelwise=convolved, input=convolved)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, x: Tensor | None = None) -> Tensor:
        """(B, h, N, dk), (B, h, M, dk), (B, h, M, d) and, with the convolution, x (B, N, C) -> (B, h, N, d)."""
        out = self.core(q, k, v, grid)
        if self.residual is None:
            return out
        if x is None:
            raise UserError(
                "inline makes the kernels of its convolution from the layer's input; pass it as x=, or set "
                "residual_kernel=0 for none"
            )
        return out + self.convolved(v, grid, x)

    def core(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """Returns the linear attention."""
        q, k, mean = self._features(q, k)
        if isinstance(grid, Packed):
            return key_product(q, k, v, grid) / grid.counts(q) + (1 - mean_product(q, k, grid)) * key_mean(v, grid)
        context = k.mT @ v / k.shape[-2]
        return q @ context + (1 - q @ mean.mT) * v.mean(-2, keepdim=True)

    def _features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns scaled features of the queries, features of the keys, and the mean of the latter (B, h, 1, dk)."""
        phi = FEATURE_MAPS[self.feature_map]
        q, k = phi(q) * self.key_dim**-0.5, phi(k)
        return q, k, k.mean(-2, keepdim=True)

    def core_factors(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """`[s q, 1 - s q.mean k] / M` and `[k, 1]`."""
        q, k, mean = self._features(q, k)
        left = torch.cat([q, 1 - q @ mean.mT], dim=-1) / k.shape[-2]
        return left, torch.cat([k, torch.ones_like(k[..., :1])], dim=-1)

    def convolved(self, v: Tensor, grid: Grid, x: Tensor) -> Tensor:  # type: ignore[override]
        """Returns the convolution of the patch values, (B, h, M, d) -> (B, h, N, d); 0 for prefix tokens."""
        mean = grid.means(x) if isinstance(grid, Packed) else x.mean(1)
        kernels = cast("nn.Module", self.residual)(mean.unsqueeze(2))  # (B, C k k, 1)
        kernels = kernels.view(mean.shape[0], self.dim, self.side, self.side)  # (B, C, k, k)
        return convolve_images(kernels, v, grid)
