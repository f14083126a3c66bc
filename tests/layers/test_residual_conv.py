"""The residual convolution is its formula on patches, and leaves prefix tokens as they are."""

import torch
from torch.nn import functional as F

from linvit import Grid
from linvit.layers.block import ResidualConv
from tests.helpers import assert_near, randn


def test_prefix_tokens_pass_it_by() -> None:
    conv = ResidualConv(4).double()
    grid = Grid((3, 5), num_prefix=2)
    x = randn(2, 17, 4)
    out = conv(x, grid)
    assert torch.equal(out[:, :2], x[:, :2])
    plane = grid.plane(x)
    assert_near(grid.plane(out), plane + F.conv2d(plane, conv.weight, conv.bias, padding=1, groups=4), 1e-12)
