"""MBConv, the inverted bottleneck with a depthwise convolution, as a feed-forward layer.

Paper: Sandler et al. 2018, "MobileNetV2: Inverted Residuals and Linear Bottlenecks", Sec. 3.3; with hard-swish and one
BatchNorm as in Cai et al. 2022, "EfficientViT".
"""

from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.base import Grid
from linvit.layers.batch_norm import BatchNormLinear


class MBConv(nn.Module):
    """Widen, convolve depthwise 3 x 3, narrow; hard-swish after the first two, BatchNorm after the last.

    The 1 x 1 convolutions are linear layers on the tokens. Prefix tokens pass the depthwise convolution by.

    Args:
        dim: Channels C.
        hidden: Hidden width.
    """

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.inverted_conv = nn.Linear(dim, hidden)
        self.depth_conv = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)
        self.point_conv = BatchNormLinear(hidden, dim)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """(B, N, C) -> (B, N, C)."""
        x = F.hardswish(self.inverted_conv(x))
        x = F.hardswish(grid.map_patches(self.depth_conv, x))
        return self.point_conv(x)  # type: ignore[no-any-return]
