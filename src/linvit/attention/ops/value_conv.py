"""A depthwise convolution of the values over all C channels, `o_c += w_c * v_c + b_c`: one kernel per channel.

It lifts the rank of a linear attention from its number of features to N. Several papers call it LePE (locally enhanced
position encoding, Dong et al. 2022, "CSWin Transformer"), Agent Attention DWC.
Cost: k^2 P C MACs for kernels of side k at P patches.
"""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.base import Grid
from linvit.attention.ops.functional import join_heads, split_heads
from linvit.attention.ops.head_conv import check_side


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
