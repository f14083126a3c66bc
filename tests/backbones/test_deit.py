"""DeiT equals timm's VisionTransformer on softmax; the FLatten presets have the reference's layout and counts."""

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import timm.optim
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

import linvit
from linvit import Grid, UserError
from linvit.backbones.deit import DeiT
from tests.golden_files import Golden, both_precisions, of_case
from tests.helpers import assert_near, assert_same_gradients, perturb, randn, relative_error

SIZES = {"img_size": (48, 32), "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 3, "num_classes": 7}


def resized_positions(table: Tensor, new_size: list[int], old_size: list[int], num_prefix_tokens: int) -> Tensor:
    """As facebookresearch/deit: main.py and detectron2's ViTDet do it, by plain bicubic; timm antialiases."""
    prefix, patches = table.tensor_split([num_prefix_tokens], dim=1)
    plane = patches.mT.unflatten(2, tuple(old_size))
    resized = F.interpolate(plane, size=tuple(new_size), mode="bicubic", align_corners=False)
    return torch.cat([prefix, resized.flatten(2).mT], dim=1)


@pytest.fixture(autouse=True)
def _positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("timm.models.vision_transformer.resample_abs_pos_embed", resized_positions)


def deit(**options: Any) -> DeiT:
    """A small DeiT in evaluation mode."""
    torch.manual_seed(0)
    return DeiT(**{**SIZES, **options}).eval()


def pair(class_token: bool = True, global_pool: str = "token", **options: Any) -> tuple[DeiT, VisionTransformer]:
    """Our DeiT and timm's, with the same weights in float64."""
    pool = {"class_token": class_token, "global_pool": global_pool}
    theirs = VisionTransformer(**{**SIZES, **options}, **pool, fc_norm=False, dynamic_img_size=True).double().eval()
    ours = deit(**pool, **options).double()
    ours.load_state_dict(perturb(theirs, scale=0.1).state_dict())
    return ours, theirs


def image(*size: int, batch: int = 2, dtype: torch.dtype = torch.float64, grad: bool = False) -> Tensor:
    return randn(batch, 3, *size, dtype=dtype, grad=grad)


# The references


@both_precisions
@of_case("deit")
def test_equals_deit(golden: Golden, dtype: torch.dtype) -> None:
    model = DeiT(**golden.constructor).to(dtype).eval()
    model.load_state_dict(golden.parameters())
    (x,) = inputs = golden.inputs(dtype)
    golden.check_call(model(x), inputs)
    _, features = model.forward_intermediates(x)
    assert len(features) == len(golden.named("feature."))
    for i, feature in enumerate(features):
        golden.check(f"feature.{i}", feature)


@both_precisions
@of_case("deit_distilled")
def test_equals_distilled_deit(golden: Golden, dtype: torch.dtype) -> None:
    model = DeiT(**golden.constructor, distilled=True).to(dtype).eval()
    model.load_state_dict(golden.parameters())
    (x,) = inputs = golden.inputs(dtype)
    golden.check_call(model(x), inputs)


def test_distilled_is_the_mean_of_two_classifiers() -> None:
    model = perturb(deit(distilled=True))
    tokens = model.forward_features(image(48, 32, dtype=torch.float32))
    want = (model.head(tokens[:, 0]) + model.head_dist(tokens[:, 1])) / 2
    assert_near(model.forward_head(tokens), want, 1e-6)
    model.reset_classifier(0)
    assert_near(model.forward_head(tokens), (tokens[:, 0] + tokens[:, 1]) / 2, 1e-6)
    with pytest.raises(UserError, match="distilled: true needs"):
        deit(distilled=True, global_pool="avg")


POOLS = [(True, "token"), (True, "avg"), (False, "avg")]


@pytest.mark.parametrize(("class_token", "global_pool"), POOLS)
@pytest.mark.parametrize("size", [(48, 32), (8, 72)], ids=str)
def test_equals_timm_at_any_size(class_token: bool, global_pool: str, size: tuple[int, int]) -> None:
    """Gradients included; positions are resized as in DeiT's fine-tuning."""
    ours, theirs = pair(class_token, global_pool)
    x = image(*size, grad=True)
    assert_near(ours.forward_features(x), theirs.forward_features(x), 1e-12)
    assert_same_gradients(ours(x), theirs(x), [x], 1e-10)


@pytest.mark.parametrize(("class_token", "global_pool"), POOLS)
def test_state_dict_is_timms(class_token: bool, global_pool: str) -> None:
    ours, theirs = pair(class_token, global_pool)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert ours.feature_info == theirs.feature_info
    for fact in ("num_classes", "num_features", "head_hidden_size", "num_prefix_tokens", "global_pool"):
        assert getattr(ours, fact) == getattr(theirs, fact)


def test_qkv_without_bias_equals_timm() -> None:
    ours, theirs = pair(qkv_bias=False, mlp_ratio=2.5)
    assert_near(ours(image(48, 32)), theirs(image(48, 32)), 1e-12)


@torch.no_grad()
@pytest.mark.parametrize("class_token", [True, False])
@pytest.mark.parametrize("indices", [None, 2, [0, 2]], ids=str)
@pytest.mark.parametrize(("norm", "output_fmt"), [(True, "NCHW"), (False, "NLC")])
def test_intermediates_are_timms(class_token: bool, indices: object, norm: bool, output_fmt: str) -> None:
    ours, theirs = pair(class_token, "avg")
    x = image(64, 48)
    for stop_early in (True, False):
        options = {"indices": indices, "norm": norm, "output_fmt": output_fmt, "stop_early": stop_early}
        got, want = (model.forward_intermediates(x, **options) for model in (ours, theirs))
        assert_near(got[0], want[0], 1e-12)
        assert len(got[1]) == len(want[1])
        for a, b in zip(got[1], want[1], strict=True):
            assert_near(a, b, 1e-12)
        only = ours.forward_intermediates(x, intermediates_only=True, **options)
        assert all(torch.equal(a, b) for a, b in zip(only, got[1], strict=True))


@torch.no_grad()
def test_intermediates_with_prefix_tokens_are_timms() -> None:
    ours, theirs = pair()
    options = {"return_prefix_tokens": True, "intermediates_only": True}
    got, want = (model.forward_intermediates(image(48, 32), **options) for model in (ours, theirs))
    for (feature, prefix), (their_feature, their_prefix) in zip(got, want, strict=True):
        assert_near(feature, their_feature, 1e-12)
        assert_near(prefix, their_prefix, 1e-12)


@torch.no_grad()
@pytest.mark.parametrize("indices", [1, [0], [-2]], ids=str)
@pytest.mark.parametrize(("prune_norm", "prune_head"), [(True, False), (False, True)])
def test_pruning_is_timms(indices: object, prune_norm: bool, prune_head: bool) -> None:
    ours, theirs = pair()
    options = {"prune_norm": prune_norm, "prune_head": prune_head}
    assert ours.prune_intermediate_layers(indices, **options) == theirs.prune_intermediate_layers(indices, **options)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    x = image(48, 32)
    assert_near(ours.forward_features(x), theirs.forward_features(x), 1e-12)
    if not prune_head:
        assert_near(ours(x), theirs(x), 1e-12)


@pytest.mark.parametrize("num_classes", [0, 5])
@pytest.mark.parametrize("global_pool", [None, "avg"])
def test_reset_classifier_is_timms(num_classes: int, global_pool: str | None) -> None:
    """Arguments included: timm's callers may set the pooling along with the number of classes."""
    ours, theirs = pair()
    arguments = [num_classes] if global_pool is None else [num_classes, global_pool]
    theirs.reset_classifier(*arguments)
    ours.reset_classifier(*arguments)
    assert ours.num_classes == num_classes
    assert type(ours.get_classifier()) is type(theirs.get_classifier())
    ours.double().load_state_dict(perturb(theirs.double()).state_dict())
    assert_near(ours(image(48, 32)), theirs(image(48, 32)), 1e-12)


def test_reset_classifier_initialises_the_new_head() -> None:
    model = deit()
    model.reset_classifier(2000)
    assert model.head.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert model.head.bias.eq(0).all()


def test_weight_decay_and_layer_groups_are_timms() -> None:
    ours, theirs = pair()
    assert ours.no_weight_decay() == theirs.no_weight_decay() & dict(theirs.named_parameters()).keys()
    groups = [timm.optim.param_groups_layer_decay(m, 0.1, m.no_weight_decay(), layer_decay=0.7) for m in (ours, theirs)]

    def settings(model: nn.Module, groups: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
        names = {id(p): name for name, p in model.named_parameters()}
        return {names[id(p)]: (g["lr_scale"], g["weight_decay"]) for g in groups for p in g["params"]}

    assert settings(ours, groups[0]) == settings(theirs, groups[1])


def test_relative_positions_are_an_option() -> None:
    """Tables of zeros are no tables; others move the output, follow another grid and are not decayed."""
    plain, model = deit(), deit(rel_pos_bias=True)
    tables = {f"blocks.{i}.attn.relative_position_bias_table" for i in range(len(plain.blocks))}
    assert {*model.state_dict()} - {*plain.state_dict()} == tables
    assert model.no_weight_decay() == plain.no_weight_decay() | tables
    model.load_state_dict({**plain.state_dict(), **{name: 0 * model.state_dict()[name] for name in tables}})
    for size in [(48, 32), (32, 80)]:
        x = image(*size, dtype=torch.float32)
        assert_near(model(x), plain(x), 1e-5)
    perturb(model.blocks[0].attn, scale=1)
    assert relative_error(model(x), plain(x)) > 1e-2
    with pytest.raises(UserError, match=r"rel_pos_bias is for a mechanism that takes a bias.*got FocusedAttention"):
        deit(rel_pos_bias=True, attention="focused")


# Training


def test_stochastic_depth_drops_whole_samples_in_training_only() -> None:
    block = copy.deepcopy(deit(depth=2, drop_path_rate=0.5).blocks[1]).double()
    grid = deit().grid
    x = randn(1, grid.num_queries, 48).expand(200, -1, -1)
    block.norm2, block.mlp = nn.Identity(), block.attn
    block.drop_path2 = nn.Linear(48, 48).double()  # 0 for any input: only the attention branch is left
    nn.init.zeros_(block.drop_path2.weight)
    nn.init.zeros_(block.drop_path2.bias)
    branch = block.eval()(x[:1], grid) - x[:1]
    torch.manual_seed(0)
    moved = block.train()(x, grid) - x
    kept = (moved != 0).flatten(1).any(1)
    assert 0.35 < kept.double().mean() < 0.65
    assert_near(moved[kept], (2 * branch).expand_as(moved[kept]), 1e-12)


@pytest.mark.parametrize(
    ("attention", "most", "most_in_training"), [("softmax", 15, 15), ("linear", 25, 65), ("focused", 30, 80)]
)
@pytest.mark.parametrize("batch", [1, 2])
def test_a_block_makes_few_calls_of_its_own(attention: str, most: int, most_in_training: int, batch: int) -> None:
    """Small inputs are slow by what Python calls around torch; a wrapper per layer would show here."""
    model = deit(attention=attention)
    x = randn(batch, model.grid.num_queries, model.embed_dim, dtype=torch.float32)
    grid = Grid(*model.grid)  # another object, as in a call of the model
    package = str(Path(linvit.__file__).parent)

    def calls(run: Callable[[], object]) -> list[str]:
        found: list[str] = []

        def note(frame: FrameType, event: str, arg: object) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(package):
                found.append(frame.f_code.co_qualname)

        sys.setprofile(note)
        try:
            run()
        finally:
            sys.setprofile(None)
        return found

    with torch.no_grad():
        found = calls(lambda: model.blocks[0](x, grid))
    assert len(found) <= most, found
    model.train()
    trained = calls(lambda: model.blocks[0](x.requires_grad_(), grid).sum().backward())
    assert len(trained) <= most_in_training, trained
