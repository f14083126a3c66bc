"""The feed-forward half of a transformer block."""

from typing import Literal

from torch import Tensor, nn

from linvit.attention.base import Grid
from linvit.layers.linear import Linear
from linvit.layers.mbconv import MBConv

FeedForward = Literal["mlp", "mbconv"]


class Mlp(nn.Module):
    """`fc2(GELU(conv(fc1 x)))` on tokens, (B, N, C) -> (B, N, C); most families leave the convolution out.

    Args:
        dim: Channels C.
        hidden: Hidden width.
        conv: PVTv2's depthwise 3 x 3 convolution of the hidden tokens as a plane. Prefix tokens pass it by.
        pre_act: ReLU before that convolution (PVTv2's linear variant).
        tanh: GELU by its approximation with tanh (SOFT).
    """

    def __init__(self, dim: int, hidden: int, conv: bool = False, pre_act: bool = False, tanh: bool = False) -> None:
        super().__init__()
        self.fc1 = Linear(dim, hidden)
        self.pre_act = nn.ReLU() if pre_act else nn.Identity()
        self.dwconv = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden) if conv else None
        self.act = nn.GELU(approximate="tanh" if tanh else "none")
        self.fc2 = Linear(hidden, dim)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """(B, N, C) -> (B, N, C)."""
        x = self.pre_act(self.fc1(x))
        if self.dwconv is not None:
            x = grid.map_patches(self.dwconv, x)
        return self.fc2(self.act(x))  # type: ignore[no-any-return]


def feed_forward(ffn: FeedForward, dim: int, hidden: int) -> Mlp | MBConv:
    """Builds the feed-forward layer of a block: "mlp", or EfficientViT's "mbconv"."""
    return Mlp(dim, hidden) if ffn == "mlp" else MBConv(dim, hidden)
