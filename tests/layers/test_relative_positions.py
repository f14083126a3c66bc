"""Tables of relative positions, entry by entry."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from linvit.layers.relative_positions import position_table, relative_position_bias
from tests.helpers import assert_near, randn


def test_relative_position_bias_of_rectangles() -> None:
    """Entry by entry; another window's table is interpolated."""
    table = randn(5 * 7, 2)
    bias = relative_position_bias(table, (3, 4), (3, 4))
    for (i, (r, c)), (j, (r2, c2)) in itertools.product(enumerate(itertools.product(range(3), range(4))), repeat=2):
        assert torch.equal(bias[:, i, j], table[(r - r2 + 2) * 7 + (c - c2 + 3)])
    square = randn(7 * 7, 2)
    resized = bicubic(square, (7, 7), (5, 9))
    assert_near(relative_position_bias(square, (4, 4), (3, 5)), relative_position_bias(resized, (3, 5), (3, 5)), 1e-12)


def bicubic(table: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """A table of relative positions, every head a plane, interpolated."""
    return F.interpolate(table.T.unflatten(1, old)[None], size=new, mode="bicubic")[0].flatten(1).T


def test_initial_table_is_normal() -> None:
    torch.manual_seed(0)
    table = position_table((12, 12), 12)
    assert table.shape == (23 * 23, 12)
    assert table.std().item() == pytest.approx(0.02, rel=0.03)
    assert table.abs().max() > 0.05
