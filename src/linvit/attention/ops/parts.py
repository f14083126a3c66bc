"""A mechanism that adds a convolution of the values, taken apart: its kernel of q and k, and the convolution."""

import copy
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.base import Attention, Grid


class Convolving(Protocol):
    """A mechanism that says what its convolution makes of the values."""

    def convolved(self, v: Tensor, grid: Grid, **extra: Tensor) -> Tensor:
        """(B, h, M, d) -> (B, h, N, d), from the layer's input `x=`, too, if the mechanism takes it."""


class ConvolvedValues(Attention):
    """The convolution of a mechanism alone, `o = conv(v)`.

    Args:
        whole: The mechanism.
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
        return cast("Convolving", self.whole).convolved(v, grid, **extra)


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


def kernel_and_convolution(mechanism: Attention, convolution: str, *, depthwise: bool = False) -> dict[str, Attention]:
    """Parts "kernel" and "convolution" of a mechanism with a method `convolved(v, grid)`; {} if it has no convolution.

    Args:
        mechanism: The mechanism, which computes the kernel alone where the convolution is None.
        convolution: Name of the attribute that holds the convolution.
        depthwise: Whether that is such a convolution as `ConvolvedValues` writes the matrix of.
    """
    conv = getattr(mechanism, convolution)
    if conv is None:
        return {}
    kernel = copy.deepcopy(mechanism)
    kernel.register_module(convolution, cast("nn.Module | None", None))
    return {"kernel": kernel, "convolution": ConvolvedValues(mechanism, conv if depthwise else None)}
