"""A mechanism that adds a convolution of the values, taken apart: its kernel of q and k, and the convolution."""

import copy
from typing import Protocol, cast

from torch import Tensor, nn

from linvit.attention.base import Attention, Grid


class Convolving(Protocol):
    """A mechanism that says what its convolution makes of the values."""

    def convolved(self, v: Tensor, grid: Grid) -> Tensor:
        """(B, h, M, d) -> (B, h, N, d)."""


class ConvolvedValues(Attention):
    """The convolution of a mechanism alone, `o = conv(v)`.

    Args:
        whole: The mechanism.
    """

    def __init__(self, whole: Attention) -> None:
        super().__init__(whole.dim, whole.num_heads, whole.grid, key_dim=whole.key_dim)
        self.whole = whole
        self.channelwise = whole.channelwise

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """(B, h, N, dk), (B, h, M, dk), (B, h, M, d) -> (B, h, N, d)."""
        return cast("Convolving", self.whole).convolved(v, grid)


def kernel_and_convolution(mechanism: Attention, convolution: str) -> dict[str, Attention]:
    """Parts "kernel" and "convolution" of a mechanism with a method `convolved(v, grid)`; {} if it has no convolution.

    Args:
        mechanism: The mechanism, which computes the kernel alone where the convolution is None.
        convolution: Name of the attribute that holds the convolution.
    """
    if getattr(mechanism, convolution) is None:
        return {}
    kernel = copy.deepcopy(mechanism)
    kernel.register_module(convolution, cast("nn.Module | None", None))
    return {"kernel": kernel, "convolution": ConvolvedValues(mechanism)}
