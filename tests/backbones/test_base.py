"""What backbones share: feature indices, sizes, initial values, parameters of several layers."""

import copy
import re
from typing import Any

import pytest
import timm.models._features
import torch
from torch import Tensor, nn

import linvit
from linvit import Attention, Grid, UserError
from linvit.attention.focused import FocusedAttention
from linvit.backbones.base import feature_indices
from linvit.backbones.deit import patch_grid
from linvit.backbones.initialise import init_vit
from linvit.registry import backbones
from linvit.registry.signatures import parameters_of
from linvit.tasks.parameter_groups import parameter_groups
from tests.families import families, small
from tests.helpers import assert_near, perturb, randn


@pytest.mark.parametrize("indices", [None, 1, 4, [-1], [0, 2], (3,)])
def test_feature_indices_are_counted_as_timm_counts(indices: object) -> None:
    assert feature_indices(4, indices) == timm.models._features.feature_take_indices(4, indices)[0]


@pytest.mark.parametrize("indices", [0, 5, -1, [4], [-5], []])
def test_feature_indices_out_of_range_are_refused(indices: object) -> None:
    with pytest.raises(UserError, match="do not fit 4 features"):
        feature_indices(4, indices)


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


ONE = {"depths": (1, 1, 1, 1)}
INITIAL: dict[str, tuple[dict[str, Any], str]] = {  # options, and the names of LayerNorms with an epsilon of 1e-6
    "deit_tiny": ({"depth": 2, "img_size": 224, "attention": ["softmax", "focused"]}, ""),
    "pvt_tiny": ({**ONE, "attention": ["softmax", "focused", "softmax", "softmax"]}, r"(?!.*(embed|attn\.sr))"),
    "pvt_v2_b1": ({**ONE, "attention": ["softmax", "focused", "softmax", "softmax"]}, r"(?!.*(embed|attn\.sr))"),
    "swin_tiny": ({**ONE, "feature_norms": True}, "none"),
    "cswin_tiny": ({**ONE, "attention": ["focused", "softmax", "softmax", "softmax"]}, "none"),
    "soft_tiny": ({}, "stages.3|norm"),
    "soft_norm_tiny": ({}, "stages.3|norm"),
}


@pytest.mark.parametrize("preset", INITIAL)
def test_initial_values(preset: str) -> None:
    """Those of timm's init_vit; convolutions have torch's, but for PVTv2's, which go by their fan-out; SOFT++ leaves
    the blocks of stages 1 to 3 at torch's, uniform within 1 / sqrt(fan in)."""
    torch.manual_seed(0)
    options, small_eps = INITIAL[preset]
    model = linvit.create_backbone(preset, **options)
    for name, table in model.named_parameters():
        if name.endswith(("pos_embed", "cls_token")):
            assert table.std().item() == pytest.approx(0.02, rel=0.15 if "cls" in name else 0.03), name
    for name, module in model.named_modules():
        if isinstance(module, nn.LayerNorm | nn.BatchNorm2d):
            assert isinstance(module, nn.BatchNorm2d) or module.eps == (1e-6 if re.match(small_eps, name) else 1e-5)
            assert module.weight.eq(1).all(), name
            assert module.bias.eq(0).all(), name
        elif isinstance(module, FocusedAttention):
            assert module.scale.eq(0).all()
            assert module.positional_encoding.eq(0).all()
        elif isinstance(module, nn.Conv2d) and preset == "pvt_v2_b1":
            fan_out = module.weight.shape[0] // module.groups * module.weight[0, 0].numel()
            assert module.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.05), name
            assert module.bias.eq(0).all(), name
        elif isinstance(module, nn.Linear | nn.Conv2d) and hasattr(module, "weight"):
            torchs = preset == "soft_norm_tiny" and re.match(r"stages\.[012]", name)
            if isinstance(module, nn.Conv2d) or torchs:
                bound = module.weight[0].numel() ** -0.5
                assert 0.9 * bound < module.weight.abs().max() <= bound, name
            else:
                assert module.weight.std().item() == pytest.approx(0.02, rel=0.05), name
                assert module.bias is None or module.bias.eq(0).all(), name


@pytest.mark.parametrize(
    ("preset", "options", "message"),
    [
        ("deit_nano", {"global_pool": "max"}, "global_pool must be one of token, avg; got 'max'"),
        ("deit_nano", {"class_token": False, "global_pool": "token"}, "set class_token: true or global_pool: avg"),
        ("deit_nano", {"num_heads": 5}, "dim 96 is not divisible by num_heads 5"),
        ("deit_nano", {"attention": "focussed"}, "Did you mean 'focused'"),
        ("pvt_tiny", {"depths": (2, 2)}, r"depths must list 4 values, one per stage; got \[2, 2\]"),
        ("pvt_tiny", {"sr_ratios": [8]}, "sr_ratios must list 4 values"),
        ("pvt_tiny", {"attention": ["softmax", "linear"]}, r"lists 2 specs, .* 8 block\(s\) in 4 stage"),
        ("pvt_tiny", {"attention": "soft", "sr_ratios": (8, 4, 2, 1)}, "use no spatial reduction"),
        ("pvt_tiny", {"attention": "poly_nl", "sr_ratios": (8, 4, 2, 1)}, "projects 'kv'.* use sr_ratio=1"),
        ("pvt_tiny", {"attention": "linear_angular", "sr_ratios": (8, 4, 2, 1)}, "same_grid, so .* use sr_ratio=1"),
        ("pvt_tiny", {"img_size": 16}, "sr_ratio 8 leaves nothing of a grid of 4x4; lower it"),
        ("pvt_v2_b0", {"embed_dims": (16, 32)}, "embed_dims must list 4 values"),
        ("pvt_v2_b2_li", {"sr_ratios": (8, 4, 2, 1)}, "excludes sr_ratios; .* Set sr_ratios: null"),
        ("swin_tiny", {"window_size": [7, 7, 7]}, r"lists 3 sides for 12 blocks in 4 stages. Give one for all, 4"),
        ("swin_tiny", {"window_size": 0}, "a side of at least 1, such as 7, or null .* got 0"),
        ("swin_tiny", {"num_heads": [2]}, "num_heads must list 4 values"),
        ("swin_tiny", {"img_size": [224]}, "img_size must be a positive side"),
        ("cswin_tiny", {"split_size": (1, 2)}, "split_size must list 4 values"),
        ("cswin_tiny", {"split_size": (0, 2, 7, 7)}, "at least 1, or None for the whole plane; got 0"),
        ("cswin_tiny", {"num_heads": (1, 2, 4, 8)}, "got 1 heads and 64 channels"),
        ("soft_tiny", {"img_size": 0}, "img_size must be a positive side"),
        ("soft_tiny", {"depths": (1, 2, 1)}, "depths must list 4 values"),
        ("ravlt_t", {"layer_scale": (1, 1)}, "layer_scale must list 4 values"),
        (
            "ravlt_t",
            {"embed_dims": (16, 32, 48, 64), "num_heads": (2, 2, 8, 4)},
            "rotary position embeddings turn pairs of channels",
        ),
        ("vssd_tiny", {"proj_bias": (True, False)}, "proj_bias must list 4 values"),
    ],
    ids=str,
)
def test_bad_option_is_refused(preset: str, options: dict[str, Any], message: str) -> None:
    with torch.device("meta"), pytest.raises(UserError, match=message):
        linvit.create_backbone(preset, **options)


@torch.no_grad()
@pytest.mark.parametrize("preset", ["swin_tiny", "cswin_tiny"])
def test_norms_of_features(preset: str) -> None:
    """They are applied to features, and not to logits; pruning drops those of later features."""
    spec = small(preset)
    plain, model = (create({**spec, "feature_norms": wanted}).double() for wanted in (False, True))
    x = randn(2, 3, 64, 96)
    plain.load_state_dict({key: t for key, t in model.state_dict().items() if not key.startswith("feature_norms")})
    assert torch.equal(plain(x), model(x))
    raw, normed = (model.forward_intermediates(x, norm=norm, intermediates_only=True) for norm in (False, True))
    for feature, own, norm in zip(raw, normed, [*model.feature_norms, model.norm], strict=True):
        assert_near(own, norm(feature.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), 1e-14)
    pruned = copy.deepcopy(model)
    assert pruned.prune_intermediate_layers([0, 1], prune_norm=False) == [0, 1]
    assert len(pruned.feature_norms) == 2
    got = pruned.forward_intermediates(x, indices=[0, 1], norm=True, stop_early=True, intermediates_only=True)
    assert all(torch.equal(a, b) for a, b in zip(got, normed, strict=False))
    model.prune_intermediate_layers([0, 1], prune_norm=True)
    assert not len(model.feature_norms)


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
