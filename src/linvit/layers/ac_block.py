"""Asymmetric convolution block of MACU-Net, in its encoder and its decoder.

Paper: Ding et al. 2019, "ACNet: Strengthening the Kernel Skeletons for Powerful CNN via Asymmetric Convolution Blocks".
"""

from torch import Tensor, nn
from torch.nn import functional as F


class ACBlock(nn.Module):
    """The sum of 3 x 3, 1 x 3 and 3 x 1 convolutions, BatchNorm, ReLU: (B, C, H, W) -> (B, C', H, W).

    The reference has one BatchNorm after the sum and a bias in each convolution.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.square = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.row = nn.Conv2d(in_channels, out_channels, (1, 3), padding=(0, 1))
        self.column = nn.Conv2d(in_channels, out_channels, (3, 1), padding=(1, 0))
        self.norm = nn.BatchNorm2d(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C', H, W)."""
        return F.relu(self.norm(self.square(x) + self.row(x) + self.column(x)))
