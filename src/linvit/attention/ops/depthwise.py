"""A depthwise convolution whose training takes less time on a CPU."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

from linvit.attention.ops.recompute import takes_function

WIDEST = 3
"""Columns of the widest kernel whose gradient oneDNN computes as that of a depthwise convolution."""
POSITIONS = 2**12
"""Positions of maps that oneDNN adds up one by one: over more of them rounding errors grow, and caches overflow."""


class DepthwiseConv2d(nn.Conv2d):
    """`nn.Conv2d` with one kernel of odd sides per channel that keeps the size of the map; see `convolve_depthwise`.

    Args:
        dim: Channels C.
        side: Side of the kernels.
    """

    def __init__(self, dim: int, side: int) -> None:
        super().__init__(dim, dim, side, padding=side // 2, groups=dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H, W)."""
        return convolve_depthwise(x, self.weight, self.bias)


def convolve_depthwise(x: Tensor, kernels: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.conv2d` of maps (B, C, H, W) with one kernel per channel, (C, 1, k, l) of odd k and l, at the same size.

    The gradient of kernels wider than 3 takes oneDNN 14 times as long as the convolution, since it computes that of
    dense blocks of 16 channels. So a CPU computes it in float32 for 3 columns of the kernels at a time, in 0.2 to 0.4
    of the time.
    """
    if (
        torch.is_grad_enabled()
        and kernels.requires_grad
        and kernels.shape[3] > WIDEST
        and x.device.type == "cpu"
        and x.dtype == kernels.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and takes_function(x)
    ):
        return _Depthwise.apply(x, kernels, bias)  # type: ignore[no-any-return]
    return _convolved(x, kernels, bias)


def _convolved(x: Tensor, kernels: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.conv2d(x, kernels, bias, padding=(kernels.shape[2] // 2, kernels.shape[3] // 2), groups=len(kernels))


class _Depthwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kernels: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, kernels)
        return _convolved(x, kernels, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, kernels = ctx.saved_tensors
        return (
            _convolved(gradient, kernels.flip(2, 3)) if ctx.needs_input_grad[0] else None,
            _of_kernels(x, gradient, kernels) if ctx.needs_input_grad[1] else None,
            gradient.sum((0, 2, 3)) if ctx.needs_input_grad[2] else None,
        )


def _of_kernels(x: Tensor, gradient: Tensor, kernels: Tensor) -> Tensor:
    """The gradient of the kernels, a few images at a time."""
    images = len(x) if torch.compiler.is_compiling() else max(1, POSITIONS // (x.shape[2] * x.shape[3]))
    parts = [_of_columns(*part, kernels) for part in zip(x.split(images), gradient.split(images), strict=True)]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def _of_columns(x: Tensor, gradient: Tensor, kernels: Tensor) -> Tensor:
    """The gradient of the kernels, columns first to third, fourth to sixth and so on."""
    channels, _, height, width = kernels.shape
    above, left = height // 2, width // 2
    gradient = F.pad(gradient, (1, 1))
    x = F.pad(x, (left, left + 2))
    parts = [
        conv2d_weight(
            x[..., first : first + gradient.shape[3]],
            (channels, 1, height, WIDEST),
            gradient,
            padding=(above, 1),
            groups=channels,
        )
        for first in range(0, width, WIDEST)
    ]
    return torch.cat(parts, 3)[..., :width]
