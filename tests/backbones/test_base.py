"""What backbones share: feature indices, sizes, initial values."""

import pytest
import timm.models._features
import torch
from torch import Tensor, nn

from linvit import Attention, Grid, UserError
from linvit.backbones.base import feature_indices, init_vit
from linvit.backbones.deit import patch_grid


@pytest.mark.parametrize("indices", [None, 1, 3, 4, [0], [-1], [0, 2], [-2, 1], (3,)])
def test_feature_indices_are_counted_as_timm_counts(indices: object) -> None:
    assert feature_indices(4, indices) == timm.models._features.feature_take_indices(4, indices)[0]


@pytest.mark.parametrize("indices", [0, 5, 6, 9, -1, [4], [-5], [0, 7], []])
def test_feature_indices_out_of_range_are_refused(indices: object) -> None:
    with pytest.raises(UserError, match="do not fit 4 features"):
        feature_indices(4, indices)


def test_patch_grid() -> None:
    assert patch_grid((48, 64), 16) == (3, 4)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((50, 64), "image size 50x64 is not divisible by patch size 16; the nearest sizes are 48x64 and 64x64"),
        ((48, 70), "image size 48x70 is not divisible by patch size 16; the nearest sizes are 48x64 and 48x80"),
        ((8, 8), "image size 8x8 is not divisible by patch size 16; the nearest sizes are 16x16 and 16x16"),
    ],
)
def test_side_that_patches_do_not_divide_is_refused(size: tuple[int, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        patch_grid(size, 16)


class Own(Attention):
    """A mechanism with initial values of its own."""

    def __init__(self, dim: int, num_heads: int, grid: Grid, *, key_dim: int | None = None) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        self.gate = nn.Linear(dim, dim)
        nn.init.constant_(self.gate.weight, 5)
        nn.init.constant_(self.gate.bias, 6)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        return v


def test_init_reaches_linears_and_leaves_mechanisms_alone() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(200, 300), nn.Sequential(Own(8, 2, Grid((2, 2))), nn.LayerNorm(8)), nn.Linear(4, 4))
    init_vit(net)
    assert net[0].weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert net[0].weight.mean().abs() < 1e-3
    assert net[0].bias.eq(0).all()
    assert net[2].bias.eq(0).all()
    own, norm = net[1]
    assert own.gate.weight.eq(5).all()
    assert own.gate.bias.eq(6).all()
    assert norm.weight.eq(1).all()
    assert norm.bias.eq(0).all()
