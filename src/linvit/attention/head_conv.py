"""A depthwise 2-D convolution of the values, `o_h += w_h * v_h`: one kernel per head, shared by the head's channels.

It lifts the rank of a low-rank attention from its number of features to N, and leaves one matrix per head.

Paper: Lu et al. 2021, "SOFT: Softmax-free Transformer with Linear Complexity" (reference code).
Cost: s^2 N C MACs for kernels of side s.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.base import Grid
from linvit.errors import UserError


def head_conv(num_heads: int, size: int) -> nn.Conv2d | None:
    """The convolution over an image whose channels are the heads; None for size 0."""
    if size < 0 or (size and size % 2 == 0):
        raise UserError(f"conv_size must be odd, such as 3, 5 or 9, or 0 for no convolution; got {size}")
    if size == 0:
        return None
    return nn.Conv2d(num_heads, num_heads, size, padding=size // 2, groups=num_heads, bias=False)


def convolve_heads(conv: nn.Conv2d, v: Tensor, grid: Grid) -> Tensor:
    """Convolved patch values, (B, h, M, d) -> (B, h, N, d); 0 for prefix tokens.

    Values on another grid than the queries' (spatial reduction) are brought to it first, bilinearly.
    """
    patches = v[:, :, grid.num_prefix :].permute(0, 3, 1, 2)  # (B, d, h, patches)
    plane = patches.flatten(0, 1).unflatten(2, grid.keys_size)  # (B*d, h, H, W)
    if grid.keys_size != grid.size:
        plane = F.interpolate(plane, size=grid.size, mode="bilinear", align_corners=False)
    plane = F.conv2d(plane, conv.weight.to(plane.dtype), padding=conv.padding, groups=conv.groups)
    local = plane.flatten(2).unflatten(0, patches.shape[:2])  # (B, d, h, H*W)
    return F.pad(local.permute(0, 2, 3, 1), (0, 0, grid.num_prefix, 0))
