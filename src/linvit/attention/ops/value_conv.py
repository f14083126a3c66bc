"""Depthwise convolutions of the values, which lift the rank of a linear attention from its number of features to N.

With one kernel per channel, `o_c += w_c * v_c + b_c`, several papers call it LePE (locally enhanced position encoding,
Dong et al. 2022, "CSWin Transformer"), Agent Attention DWC. With one per head, which its channels share (the code of
Lu et al. 2021, "SOFT"), it leaves one matrix per head.
Cost: k^2 P C MACs for kernels of side k at P patches.
"""

from collections.abc import Callable
from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.base import Grid
from linvit.attention.ops.functional import join_heads, split_heads
from linvit.errors import check_number, check_odd


def check_side(option: str, side: int, examples: str) -> None:
    """Raises a `UserError` unless `side` is that of a kernel with a centre, or 0 for no convolution."""
    check_number(option, side, at_least=0, whole=True, note=" (0: no convolution)")
    if side:
        check_odd(option, side, f"{examples}, or 0 for no convolution")


def head_conv(num_heads: int, size: int) -> nn.Conv2d | None:
    """The convolution over an image whose channels are the heads; None for size 0."""
    check_side("conv_size", size, "3, 5 or 9")
    if size == 0:
        return None
    return nn.Conv2d(num_heads, num_heads, size, padding=size // 2, groups=num_heads, bias=False)


def convolve_heads(conv: nn.Conv2d, v: Tensor, grid: Grid) -> Tensor:
    """Convolved patch values, (B, h, M, d) -> (B, h, N, d); 0 for prefix tokens.

    Values on another grid than the queries' (spatial reduction) are brought to it first, bilinearly.
    """
    patches = v[:, :, grid.num_prefix :].transpose(1, 2).flatten(2)  # (B, patches, h*d)
    plane = patches.mT.unflatten(2, grid.keys_size)  # (B, h*d, H, W), channels last in memory
    if grid.keys_size != grid.size:
        plane = F.interpolate(plane, size=grid.size, mode="bilinear", align_corners=False)
    kernels = _per_channel(conv, v)  # (h*d, 1, s, s)
    plane = F.conv2d(plane, kernels, padding=cast("tuple[int, int]", conv.padding), groups=len(kernels))
    local = plane.flatten(2).mT.unflatten(2, (v.shape[1], v.shape[3])).transpose(1, 2)  # (B, h, H*W, d)
    return F.pad(local, (0, 0, grid.num_prefix, 0)) if grid.num_prefix else local


def convolve_sequence(conv: nn.Conv2d, v: Tensor) -> Tensor:
    """Values (B, h, N, d) convolved along the sequence of all tokens by kernels (h, 1, r, 1), (B, h, N, d)."""
    kernels = _per_channel(conv, v).squeeze(3)  # (h*d, 1, r)
    tokens = v.mT.flatten(1, 2)  # (B, h*d, N)
    along = F.conv1d(tokens, kernels, padding=conv.padding[0], groups=len(kernels))
    local: Tensor = along.unflatten(1, v.shape[1::2]).mT
    return local


def _per_channel(conv: nn.Conv2d, v: Tensor) -> Tensor:
    """Each head's kernel once for each of its channels, (h*d, 1, ...): depthwise, many times faster than h groups."""
    return conv.weight.to(v.dtype).repeat_interleave(v.shape[3], 0)


def value_conv(option: str, dim: int, side: int) -> nn.Conv2d | None:
    """The convolution of C = `dim` channels with a bias; None for side 0. `option` sets the side, for messages."""
    check_side(option, side, "3 or 5")
    return depthwise_conv(dim, side) if side else None


def depthwise_conv(dim: int, side: int) -> nn.Conv2d:
    """A convolution with one kernel of odd sides per channel that keeps the size of the map."""
    return nn.Conv2d(dim, dim, side, padding=side // 2, groups=dim)


def convolve_values(conv: Callable[[Tensor], Tensor], v: Tensor, grid: Grid) -> Tensor:
    """Convolved patch values with the bias, (B, h, M, d) -> (B, h, N, d); 0 for prefix tokens.

    Values on another grid than the queries' (spatial reduction) are brought to it first, bilinearly.
    """
    rows = join_heads(v)[:, grid.num_prefix :]  # (B, patches, C)
    plane = rows.mT.unflatten(2, grid.keys_size)  # (B, C, H, W), channels last in memory
    if grid.keys_size != grid.size:
        plane = F.interpolate(plane, size=grid.size, mode="bilinear", align_corners=False)
    local = conv(plane).flatten(2).mT  # (B, H*W, C)
    if grid.num_prefix:
        local = F.pad(local, (0, 0, grid.num_prefix, 0))
    return split_heads(local, v.shape[1]).to(v.dtype)
