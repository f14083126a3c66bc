"""Mechanisms that add a convolution of the values to a kernel of q and k, and these two parts alone."""

import copy
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.base import Attention, Grid
from linvit.attention.ops.value_conv import convolve_values


class ConvolvedAttention(Attention):
    """A mechanism that adds a convolution of the values to what its kernel of q and k makes of them.

    A subclass has `kernel`, and the convolution under the name `convolution`, where None leaves it out.

    Attributes:
        convolution: Name of the attribute.
        depthwise: Whether that is such a convolution as `ConvolvedValues` writes the matrix of.
        kernel_channelwise: Whether the kernel's matrix differs from channel to channel.
    """

    convolution: ClassVar[str]
    depthwise: ClassVar[bool] = True
    kernel_channelwise: ClassVar[bool] = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """(B, h, N, dk), (B, h, M, dk), (B, h, M, d) -> (B, h, N, d)."""
        if getattr(self, self.convolution) is None:
            return self.kernel(q, k, v, grid)
        # The convolution comes first, since torch.compile lays out what precedes one as the channels of an image.
        return self.convolved(v, grid) + self.kernel(q, k, v, grid)

    def kernel(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """The mechanism without the convolution."""
        raise NotImplementedError(f"{type(self).__name__} has no kernel")

    def convolved(self, v: Tensor, grid: Grid) -> Tensor:
        """The convolution of the values, (B, h, M, d) -> (B, h, N, d); 0 for prefix tokens."""
        return convolve_values(getattr(self, self.convolution), v, grid)

    def factors(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor] | None:
        """Those of the kernel; None with the convolution, whose matrix has no thin factors."""
        return self.kernel_factors(q, k, grid) if getattr(self, self.convolution) is None else None

    def kernel_factors(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor] | None:
        """Factors of the kernel's matrix; see `Attention.factors`."""
        return None

    def rank_bound(self, grid: Grid) -> int:
        """The number of tokens; without the convolution the rank of the kernel, if that is smaller."""
        tokens = min(grid.num_queries, grid.num_keys)
        return tokens if getattr(self, self.convolution) is not None else min(tokens, self.kernel_rank(grid))

    def kernel_rank(self, grid: Grid) -> int:
        """An upper bound of the rank of the kernel's matrix: `max_rank`, unless it depends on the grid."""
        return super().rank_bound(grid)

    def matrix_parts(self) -> dict[str, Attention]:
        """The kernel and the convolution, if there is one."""
        conv = getattr(self, self.convolution)
        if conv is None:
            return {}
        kernel = copy.deepcopy(self)
        kernel.register_module(self.convolution, None)
        kernel.channelwise, kernel.takes_input = self.kernel_channelwise, False
        return {"kernel": kernel, "convolution": ConvolvedValues(self, conv if self.depthwise else None)}


class ConvolvedValues(Attention):
    """The convolution of a mechanism alone, `o = conv(v)`.

    Args:
        depthwise: The convolution itself, where it is one over the grid of the patches, padded with zeros, with a
            kernel per channel, or per channel of a head, which all heads share: then its matrix need not be probed.
    """

    def __init__(self, whole: Attention, depthwise: nn.Conv2d | None = None) -> None:
        super().__init__(whole.dim, whole.num_heads, whole.grid, key_dim=whole.key_dim)
        self.whole = whole
        self.depthwise = depthwise
        self.channelwise = whole.channelwise
        self.takes_input = whole.takes_input

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, **extra: Tensor) -> Tensor:
        """(B, h, N, dk), (B, h, M, dk), (B, h, M, d) -> (B, h, N, d)."""
        return self.whole.convolved(v, grid, **extra)  # type: ignore[no-any-return, operator]


def depthwise_matrix(kernels: Tensor, grid: Grid) -> Tensor:
    """The banded matrices (..., N, N) of convolutions of patches, padded with zeros, with odd kernels (..., s, t)."""
    (rows, columns), (s, t) = grid.size, kernels.shape[-2:]
    down, right = (  # (H, H) and (W, W): which row and column of a kernel is between a query and a key
        torch.arange(side, device=kernels.device) - torch.arange(side, device=kernels.device)[:, None] + width // 2
        for side, width in ((rows, s), (columns, t))
    )
    inside = ((down >= 0) & (down < s))[:, None, :, None] & ((right >= 0) & (right < t))[:, None]  # (H, W, H, W)
    entry = down.clamp(0, s - 1)[:, None, :, None] * t + right.clamp(0, t - 1)[:, None]
    matrix = torch.where(inside, kernels.flatten(-2)[..., entry], 0).flatten(-4, -3).flatten(-2)  # (..., H*W, H*W)
    return F.pad(matrix, (grid.num_prefix, 0, grid.num_prefix, 0))
