"""PVTv2 and FLatten-PVTv2 equal the official classes and timm's, and carry any attention over images of any size."""

from typing import Any

import pytest
import torch
from timm.models.pvt_v2 import PyramidVisionTransformerV2
from torch import Tensor

from linvit.backbones.pvt_v2 import PVTv2
from linvit.weights.fit import fit_projections
from linvit.weights.layouts.backbones import PVT_V2, PVT_V2_TIMM
from linvit.weights.layouts.layout import Layout
from tests.golden_files import Golden, both_precisions, focused_spec, of_case
from tests.helpers import assert_near, assert_same_gradients, perturb, randn

SIZES = {
    "img_size": 64,
    "num_classes": 7,
    "embed_dims": (16, 32, 40, 48),
    "depths": (1, 2, 1, 1),
    "num_heads": (1, 2, 5, 4),
    "mlp_ratios": (4, 4, 2, 2),
}


def small(**options: Any) -> PVTv2:
    """A small PVTv2 in evaluation mode."""
    torch.manual_seed(0)
    return PVTv2(**{**SIZES, **options}).eval()


def image(*size: int, batch: int = 2, dtype: torch.dtype = torch.float64, grad: bool = False) -> Tensor:
    return randn(batch, 3, *size, dtype=dtype, grad=grad)


def load_official(model: PVTv2, official: dict[str, Tensor], layout: Layout = PVT_V2) -> None:
    assert layout.recognises(official)
    model.load_state_dict(fit_projections(layout.translate(official), model))


def golden_model(golden: Golden, dtype: torch.dtype) -> PVTv2:
    """Our model for an official constructor, with its parameters."""
    official = golden.constructor
    options = {name: official[name] for name in (*SIZES, "qkv_bias", "sr_ratios", "linear") if name in official}
    if "attn_type" in official:
        assert official["attn_type"] == "LLLL"
        options |= {"attention": focused_spec(golden), "sr_ratios": [int(r) for r in official["la_sr_ratios"]]}
    if golden.meta["case"] == "pvt_v2_dense":
        options["num_classes"] = 0
    model = PVTv2(**options).to(dtype).eval()
    load_official(model, golden.parameters())
    return model


# The references


@both_precisions
@of_case("pvt_v2", "flatten_pvt_v2")
def test_equals_pvt_v2(golden: Golden, dtype: torch.dtype) -> None:
    model = golden_model(golden, dtype)
    (x,) = inputs = golden.inputs(dtype)
    golden.check_call(model(x), inputs)
    golden.check("stage.norm4.output", model.forward_features(x))
    for i, feature in enumerate(model.forward_intermediates(x, [0, 1, 2], intermediates_only=True)):
        golden.check(f"stage.patch_embed{i + 2}.input", feature)


@both_precisions
@of_case("pvt_v2_dense")
def test_equals_dense_pvt_v2(golden: Golden, dtype: torch.dtype) -> None:
    model = golden_model(golden, dtype)
    (x,) = inputs = golden.inputs(dtype)
    features = model.forward_intermediates(x, intermediates_only=True)
    for i, feature in enumerate(features):
        golden.check(f"feature.{i}", feature)
    golden.check_call(features[-1], inputs)


@pytest.mark.parametrize(
    ("options", "size"),
    [({}, (97, 131)), ({"linear": True}, (160, 32)), ({"qkv_bias": False, "sr_ratios": (5, 3, 1, 1)}, (97, 131))],
    ids=str,
)
def test_equals_timm_at_any_size(options: dict[str, Any], size: tuple[int, int]) -> None:
    """Gradients included, at sizes that no stride and no reduction divides."""
    sizes = {name: value for name, value in SIZES.items() if name != "img_size"}
    theirs = perturb(PyramidVisionTransformerV2(**sizes, **options), scale=0.1).double().eval()
    ours = small(**options).double()
    load_official(ours, theirs.state_dict(), PVT_V2_TIMM)
    x = image(*size, grad=True)
    assert_same_gradients(ours(x), theirs(x), [x], 1e-10)
    got, want = (model.forward_intermediates(x, intermediates_only=True) for model in (ours, theirs))
    for feature, their_feature in zip(got, want, strict=True):
        assert_near(feature, their_feature, 1e-10)


# Attention


@pytest.mark.parametrize("attention", ["focused", "linformer"])
def test_linear_reduction_with_another_attention_trains(attention: str) -> None:
    model = small(attention=attention, linear=True).train()
    model(image(64, 96, dtype=torch.float32)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({}, [(8, 8), (4, 4), (4, 4), (2, 2), (1, 1)]),
        ({"linear": True}, [(7, 7)] * 5),
        ({"sr_ratios": [4, 2, 1, 1]}, [(4, 4), (2, 2), (2, 2), (1, 1), (1, 1)]),
        ({"attention": ["soft", "linear_angular", "softmax", "focused"]}, [(1, 1), (1, 1), (1, 1), (2, 2), (1, 1)]),
        ({"attention": ["soft", "poly_nl", "softmax", "focused"], "linear": True}, [*[(1, 1)] * 3, (7, 7), (7, 7)]),
    ],
    ids=str,
)
def test_spatial_reduction(options: dict[str, Any], want: list[tuple[int, int]]) -> None:
    """Windows of the strided reduction, cells of the pooled one; (1, 1) is none."""
    model = small(**options)
    got = []
    for stage in model.stages:
        for block in stage.blocks:
            reduction = block.attn.sr
            pooled = hasattr(reduction, "size")
            got.append((1, 1) if reduction is None else reduction.size if pooled else reduction.conv.kernel_size)
    assert got == want
    assert model(image(64, 64, dtype=torch.float32)).isfinite().all()
