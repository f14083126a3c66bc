"""What backbones share: feature indices, sizes, initial values, parameters of several layers."""

import copy
from typing import Any

import pytest
import timm.models._features
import torch
from torch import Tensor, nn

import linvit
from linvit import Attention, Grid, UserError
from linvit.backbones.base import feature_indices
from linvit.backbones.deit import patch_grid
from linvit.backbones.initialise import init_vit
from linvit.registry import backbones
from linvit.registry.signatures import parameters_of
from linvit.tasks.parameter_groups import parameter_groups
from tests.families import families, small
from tests.helpers import perturb, randn


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
        self.own = nn.Linear(dim, dim)
        nn.init.constant_(self.own.weight, 5)
        nn.init.constant_(self.own.bias, 6)

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
    assert own.own.weight.eq(5).all()
    assert own.own.bias.eq(6).all()
    assert norm.weight.eq(1).all()
    assert norm.bias.eq(0).all()


# Dropout


@pytest.mark.parametrize(
    "name", [name for name in families().values() if "proj_drop" in parameters_of(backbones.get(name))]
)
def test_dropout_follows_every_attention(name: str) -> None:
    calm, dropping = (create({**small(name), "proj_drop": rate}) for rate in (0.0, 0.25))
    layers = [module for module in dropping.modules() if hasattr(module, "projections") and hasattr(module, "proj")]
    assert layers
    assert all(layer.proj_drop.p == 0.25 for layer in layers)
    x = randn(1, 3, 64, 64, dtype=torch.float32)
    assert torch.equal(calm(x), dropping(x))
    assert not torch.equal(calm.train()(x), dropping.train()(x))
    for rate in (1.5, True, "0.1"):
        with pytest.raises(UserError, match=f"proj_drop must be a number at least 0 and at most 1; got {rate!r}"):
            create({**small(name), "proj_drop": rate})


# Parameters that layers share

PYRAMID = {"depths": (2, 2, 2, 2), "num_heads": (1, 1, 2, 2)}
FAMILIES: list[tuple[dict[str, Any], int, int]] = [  # with their mechanisms, and what these have of different matrices
    ({"name": "deit_nano", "depth": 3}, 3, 1),
    ({"name": "pvt_tiny", "embed_dims": (8, 8, 16, 16), **PYRAMID}, 8, 4),  # one channel count, two grids
    ({"name": "pvt_v2_b0", "embed_dims": (8, 8, 16, 16), **PYRAMID}, 8, 4),
    ({"name": "swin_tiny", "embed_dim": 8, **PYRAMID}, 8, 4),
    (
        {"name": "cswin_tiny", "embed_dim": 16, **PYRAMID, "num_heads": (2, 2, 2, 2)},
        12,
        6,
    ),  # two stages of two branches
    ({"name": "soft_tiny", "embed_dims": (8, 8, 16, 16), **PYRAMID}, 8, 4),
    ({"name": "timm", "model": "test_vit", "img_size": 64}, 6, 1),
]


@pytest.fixture(params=FAMILIES, ids=lambda family: family[0]["name"])
def layerwise(request: pytest.FixtureRequest) -> tuple[dict[str, Any], int, int]:
    spec, layers, matrices = request.param
    return {**spec, "attention": {"name": "linformer", "share": "layerwise", "k": 4}}, layers, matrices


def create(spec: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    return perturb(linvit.create_backbone({"img_size": 64, "num_classes": 5, **spec}), scale=0.1).eval()


def matrices_of(model: nn.Module) -> list[nn.Parameter]:
    return [module.proj_k for module in model.modules() if isinstance(module, Attention)]


def test_layers_share_one_matrix_per_stage(layerwise: tuple[dict[str, Any], int, int]) -> None:
    spec, layers, matrices = layerwise
    model = create(spec)
    assert len(matrices_of(model)) == layers
    assert len(set(matrices_of(model))) == matrices
    alone = create({**spec, "attention": {"name": "linformer", "share": "kv", "k": 4}})
    counts = [sum(parameter.numel() for parameter in one.parameters()) for one in (alone, model)]
    own = sum(matrix.numel() for matrix in matrices_of(model))
    assert counts[0] - counts[1] == own - sum(matrix.numel() for matrix in set(matrices_of(model)))


@torch.no_grad()
def test_what_is_shared_survives_copies_and_files(layerwise: tuple[dict[str, Any], int, int]) -> None:
    spec, _, matrices = layerwise
    model, fresh = create(spec), create(spec)
    perturb(fresh, seed=50, scale=0.1)
    fresh.load_state_dict(model.state_dict())
    x = randn(2, 3, 64, 64, dtype=torch.float32)
    for twin in (copy.deepcopy(model), fresh, model.double().float()):
        assert len(set(matrices_of(twin))) == matrices
        assert torch.equal(twin(x), model(x))


@pytest.mark.parametrize("layer_decay", [None, 0.7])
def test_what_is_shared_is_optimised_once(
    layerwise: tuple[dict[str, Any], int, int], layer_decay: float | None
) -> None:
    model = create(layerwise[0])
    grouped = [parameter for group in parameter_groups(model, 1e-3, 0.05, layer_decay) for parameter in group["params"]]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == set(model.parameters())
