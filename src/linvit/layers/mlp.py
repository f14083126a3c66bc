"""Feed-forward layers of transformer blocks, and the linear layers of blocks."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.base import Grid, Packed
from linvit.attention.ops.cast_linear import cast_linear
from linvit.attention.ops.decorators import supports_custom_autograd
from linvit.attention.ops.functional import is_exporting

FeedForward = Literal["mlp", "mbconv"]


class Linear(nn.Linear):
    """`nn.Linear`, (..., C) -> (..., C'), with fewer passes over memory and fewer kernels.

    On a GPU under autocast one kernel casts weight and bias; gradients need no cast: products return them in float32.

    If torch compiles it for a CPU, the bias is added by the next kernel. torch's product with a bias first writes the
    bias to every token, a pass over memory that inductor keeps. A separate sum is fused with the following operations:
    a compiled FLatten-PVT-T takes 0.88 of the time, a step of its training 0.94.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., C')."""
        compiled = torch.compiler.is_compiling() and not is_exporting()
        plain = type(self.weight) is nn.Parameter and self.weight.dtype == torch.float32
        if x.is_cuda and plain and torch.is_autocast_enabled("cuda") and not compiled and supports_custom_autograd(x):
            parameters = (self.weight,) if self.bias is None else (self.weight, self.bias)
            return cast_linear(x.to(torch.get_autocast_dtype("cuda")), *parameters)
        if self.bias is None or not compiled or x.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
            return super().forward(x)
        return F.linear(x, self.weight) + self.bias


class Mlp(nn.Module):
    """`fc2(GELU(conv(fc1 x)))` on tokens, (B, N, C) -> (B, N, C); most families have no convolution.

    The convolution is PVTv2's, depthwise 3 x 3 on the hidden tokens as a plane, without prefix tokens. Its linear
    variant has a ReLU before it (`pre_act`). `tanh` approximates GELU (SOFT).
    """

    def __init__(self, dim: int, hidden: int, conv: bool = False, pre_act: bool = False, tanh: bool = False) -> None:
        super().__init__()
        self.fc1 = Linear(dim, hidden)
        self.pre_act = nn.ReLU() if pre_act else nn.Identity()
        self.dwconv = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden) if conv else None
        self.act = nn.GELU(approximate="tanh" if tanh else "none")
        self.fc2 = Linear(hidden, dim)

    def forward(self, x: Tensor, grid: Grid | Packed) -> Tensor:
        """(B, N, C) -> (B, N, C)."""
        x = self.pre_act(self.fc1(x))
        if self.dwconv is not None:
            x = grid.map_patches(self.dwconv, x)
        return self.fc2(self.act(x))  # type: ignore[no-any-return]


class BatchNormLinear(Linear):
    """A linear map, then BatchNorm of each channel over all tokens of the batch; (B, N, C) -> (B, N, C').

    On the tokens of a plane it is a 1 x 1 convolution with `BatchNorm2d`. In training it makes the samples of a batch
    depend on each other. Under gradient checkpointing running statistics are updated twice per step, as torch's are.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias)
        self.norm = nn.BatchNorm1d(out_features)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, C) -> (B, N, C')."""
        x = super().forward(x)
        return self.norm(x.flatten(0, 1)).view_as(x)  # type: ignore[no-any-return]


class MBConv(nn.Module):
    """Inverted bottleneck: 1 x 1 convolution, depthwise 3 x 3, 1 x 1; hard-swish after the first two, BatchNorm last.

    The 1 x 1 convolutions are linear layers on the tokens. Prefix tokens skip the depthwise convolution.
    """

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.inverted_conv = Linear(dim, hidden)
        self.depth_conv = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)
        self.point_conv = BatchNormLinear(hidden, dim)

    def forward(self, x: Tensor, grid: Grid | Packed) -> Tensor:
        """(B, N, C) -> (B, N, C)."""
        x = F.hardswish(self.inverted_conv(x))
        x = F.hardswish(grid.map_patches(self.depth_conv, x))
        return self.point_conv(x)  # type: ignore[no-any-return]


def feed_forward(ffn: FeedForward, dim: int, hidden: int) -> Mlp | MBConv:
    """Builds the feed-forward layer of a block: "mlp", or EfficientViT's "mbconv"."""
    return Mlp(dim, hidden) if ffn == "mlp" else MBConv(dim, hidden)
