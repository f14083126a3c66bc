"""MBConv on tokens: the convolutions written out, and what prefix tokens are spared."""

import torch
from torch import Tensor
from torch.nn import functional as F

from linvit import Grid
from linvit.layers.mlp import MBConv
from tests.helpers import assert_same_gradients, perturb, randn


def naive(layer: MBConv, x: Tensor, grid: Grid) -> Tensor:
    """Patch by patch, a neighbour off the plane being zero; prefix tokens have no neighbours."""
    hidden = x @ layer.inverted_conv.weight.T + layer.inverted_conv.bias
    hidden = hidden * (hidden + 3).clamp(0, 6) / 6
    prefix, plane = hidden[:, : grid.num_prefix], hidden[:, grid.num_prefix :].unflatten(1, grid.size)
    padded = F.pad(plane, (0, 0, 1, 1, 1, 1))
    height, width = grid.size
    local = layer.depth_conv.bias + sum(
        padded[:, i : i + height, j : j + width] * layer.depth_conv.weight[:, 0, i, j]
        for i in range(3)
        for j in range(3)
    )
    hidden = torch.cat([prefix, local.flatten(1, 2)], dim=1)
    out = (hidden * (hidden + 3).clamp(0, 6) / 6) @ layer.point_conv.weight.T
    norm = layer.point_conv.norm
    return (out - out.mean((0, 1))) / (out.var((0, 1), unbiased=False) + 1e-5).sqrt() * norm.weight + norm.bias


def test_equals_the_formula() -> None:
    layer = perturb(MBConv(6, 15).double())
    for grid in (Grid((3, 5)), Grid((1, 4), num_prefix=2), Grid((4, 1), num_prefix=1)):
        x = randn(2, grid.num_queries, 6, grad=True)
        assert_same_gradients(layer(x, grid), naive(layer, x, grid), [x, *layer.parameters()], 1e-9)
