"""PVTv2 and FLatten-PVTv2 equal the official classes and timm's, and carry any attention over images of any size."""

from typing import Any

import pytest
import torch
from timm.models.pvt_v2 import PyramidVisionTransformerV2
from torch import Tensor, nn

import linvit
from linvit import UserError
from linvit.attention.focused import FocusedAttention
from linvit.backbones.pvt_v2 import PVTv2
from linvit.weights.fit import fit_projections
from linvit.weights.layouts.backbones import PVT, PVT_V2, PVT_V2_TIMM
from linvit.weights.layouts.layout import Layout
from tests.golden_files import Golden, both_precisions, focused_spec, of_case
from tests.helpers import assert_near, assert_same_gradients, perturb, randn
from tests.official import fill, images
from tests.official.pvt import pvt
from tests.official.pvt_v2 import VARIANTS, pvt_v2

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
    ("name", "size", "first", "total", "mean_abs", "second"),
    [  # the official classes in float64: logits of the first image, sum and mean |.| of all, logit of the second image
        pytest.param(
            "pvt_v2_b0",
            (224, 224),
            (-0.071285144, -0.028565052, 0.025421329, -0.093230726),
            -4.524666,
            0.053803562,
            -0.054994472,
            marks=pytest.mark.slow,
        ),
        (
            "pvt_v2_b0",
            (256, 320),
            (-0.043539103, -0.012869316, 0.087515258, -0.0014701327),
            -5.0669169,
            0.054198342,
            -0.064497235,
        ),
        pytest.param(
            "pvt_v2_b2_li",
            (224, 224),
            (-0.02039492, -0.12183461, -0.20298905, -0.0040951321),
            11.488558,
            0.096214212,
            -0.012282857,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "flatten_pvt_v2_b0",
            (224, 224),
            (-0.090385574, -0.023506715, 0.020882644, -0.098897301),
            -5.0404408,
            0.053628374,
            -0.058631076,
            marks=pytest.mark.slow,
        ),
    ],
)
@torch.no_grad()
def test_equals_the_published_sizes(
    name: str, size: tuple[int, int], first: tuple[float, ...], total: float, mean_abs: float, second: float
) -> None:
    model = linvit.create_backbone(name).double().eval()
    load_official(model, fill(pvt_v2(**VARIANTS[name])))
    logits = model(images(*size))
    got = [*logits[0, :4].tolist(), logits.sum().item(), logits.abs().mean().item(), logits[1, 0].item()]
    assert got == pytest.approx([*first, total, mean_abs, second], rel=1e-7)


@pytest.mark.parametrize("options", [{}, {"linear": True}, {"qkv_bias": False, "sr_ratios": (5, 3, 1, 1)}], ids=str)
@pytest.mark.parametrize("size", [(64, 64), (97, 131), (160, 32)], ids=str)
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


@pytest.mark.parametrize("name", VARIANTS)
def test_official_names_are_all_of_the_models(name: str) -> None:
    with torch.device("meta"):
        model = linvit.create_backbone(name)
        official = {key: torch.empty(shape) for key, shape in pvt_v2(**VARIANTS[name]).items()}
    state = fit_projections(PVT_V2.translate(official), model)
    assert {key: t.shape for key, t in state.items()} == {key: t.shape for key, t in model.state_dict().items()}


def test_layouts_are_told_from_their_relatives() -> None:
    timms = PyramidVisionTransformerV2(embed_dims=(8, 16, 24, 32), num_heads=(1, 1, 1, 1)).state_dict()
    files = {"v1": pvt(), "v2": pvt_v2(), "flatten": pvt_v2(**VARIANTS["flatten_pvt_v2_b0"]), "timm": timms}
    files["ours"] = small().state_dict()
    owners = {name: [x for x in (PVT, PVT_V2, PVT_V2_TIMM) if x.recognises(f)] for name, f in files.items()}
    assert owners == {"v1": [PVT], "v2": [PVT_V2], "flatten": [PVT_V2], "timm": [PVT_V2_TIMM], "ours": []}


# Other image sizes


# Attention


@pytest.mark.parametrize("attention", ["focused", "agent", "linformer"])
def test_linear_reduction_with_another_attention_trains(attention: str) -> None:
    model = small(attention=attention, linear=True).train()
    model(image(64, 96, dtype=torch.float32)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def mechanisms(model: nn.Module) -> list[str]:
    return [type(block.attn.mechanism).__name__ for stage in model.stages for block in stage.blocks]


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({}, [(8, 8), (4, 4), (4, 4), (2, 2), (1, 1)]),
        ({"linear": True}, [(7, 7)] * 5),
        ({"sr_ratios": [4, 2, 1, 1]}, [(4, 4), (2, 2), (2, 2), (1, 1), (1, 1)]),
        ({"attention": "soft"}, [(1, 1)] * 5),
        ({"attention": ["soft", "linear_angular", "softmax", "focused"]}, [(1, 1), (1, 1), (1, 1), (2, 2), (1, 1)]),
        ({"attention": ["soft", "poly_nl", "softmax", "focused"], "linear": True}, [*[(1, 1)] * 3, (7, 7), (7, 7)]),
        ({"attention": {"name": "nystrom", "conv_kernel": 3}, "linear": True}, [(1, 1)] * 5),
        ({"attention": {"name": "soft", "tie_qk": False}}, [(8, 8), (4, 4), (4, 4), (2, 2), (1, 1)]),
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


@pytest.mark.parametrize("name", ["flatten_pvt_v2_b0", "flatten_pvt_v2_b4"])
def test_flatten_is_focused_in_every_block_without_reduction(name: str) -> None:
    with torch.device("meta"):
        model = linvit.create_backbone(name)
    assert set(mechanisms(model)) == {FocusedAttention.__name__}
    for stage in model.stages:
        for block in stage.blocks:
            assert block.attn.sr is None
            assert block.attn.mechanism.focusing_factor == 3
            assert block.attn.mechanism.dwc.kernel_size == (5, 5)


@torch.no_grad()
def test_features_carry_the_norm_of_their_stage() -> None:
    model = perturb(small().double(), scale=0.1)
    x = image(64, 96)
    assert model.feature_info == [
        {"module": f"stages.{i}", "num_chs": dim, "reduction": reduction}
        for i, (dim, reduction) in enumerate(zip(SIZES["embed_dims"], (4, 8, 16, 32), strict=True))
    ]
    last, features = model.forward_intermediates(x)
    assert torch.equal(last, model.forward_features(x))
    assert torch.equal(features[-1].flatten(2).mT, last)
    assert torch.equal(model.forward_head(last, pre_logits=True), last.mean(1))
    for stage, feature in zip(model.stages, features, strict=True):
        normalised = (feature.flatten(2).mT - stage.norm.bias) / stage.norm.weight
        assert normalised.mean(-1).abs().max() < 1e-12
        assert normalised.var(-1, correction=0).sub(1).abs().max() < 1e-3


# Training


def test_nothing_is_spared_from_decay() -> None:
    assert small().no_weight_decay() == set()


def test_initial_values() -> None:
    """Convolutions by their fan-out; those of mechanisms keep their own values, but for the focused attention's."""
    torch.manual_seed(0)
    model = PVTv2(depths=(1, 1, 1, 1), attention=["softmax", "focused", "softmax", "linear_angular"])
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            assert module.weight.std().item() == pytest.approx(0.02, rel=0.05), name
            assert module.bias.eq(0).all(), name
        if isinstance(module, nn.LayerNorm):
            assert module.eps == (1e-5 if "embed" in name or "attn.sr" in name else 1e-6), name
            assert module.weight.eq(1).all(), name
            assert module.bias.eq(0).all(), name
        if isinstance(module, nn.Conv2d) and "dconv" not in name:
            assert module.bias.eq(0).all(), name
    stage = model.stages[1]
    for conv, std in [
        (model.stages[0].embed.proj, (2 / (7 * 7 * 64)) ** 0.5),
        (stage.embed.proj, (2 / (3 * 3 * 128)) ** 0.5),
        (stage.blocks[0].attn.sr.conv, (2 / (4 * 4 * 128)) ** 0.5),
        (stage.blocks[0].mlp.dwconv, (2 / 9) ** 0.5),
        (stage.blocks[0].attn.mechanism.dwc, (2 / 25) ** 0.5),
    ]:
        assert conv.weight.std().item() == pytest.approx(std, rel=0.05)
        assert conv.weight.abs().max() > 2.5 * std  # normal, not uniform
    focused = stage.blocks[0].attn.mechanism
    assert focused.scale.eq(0).all()
    assert focused.positional_encoding.eq(0).all()
    assert model.stages[3].blocks[0].attn.mechanism.dconv.weight.abs().max() <= 9**-0.5  # torch's own


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embed_dims": (16, 32)}, r"embed_dims must list 4 values, one per stage; got \[16, 32\]"),
        ({"sr_ratios": [8]}, r"sr_ratios must list 4 values, one per stage; got \[8\]"),
        ({"linear": True, "sr_ratios": (8, 4, 2, 1)}, r"excludes sr_ratios; got \[8, 4, 2, 1\]. Set sr_ratios: null"),
        ({"attention": ["softmax", "linear"]}, r"lists 2 specs, but this backbone has 5 block\(s\) in 4 stage"),
        ({"attention": "poly_nl", "sr_ratios": (8, 4, 2, 1)}, "PolyNLAttention projects 'kv'.* use sr_ratio=1"),
        ({"attention": "focussed"}, "Did you mean 'focused'"),
        ({"img_size": 16}, "sr_ratio 8 leaves nothing of a grid of 4x4; lower it"),
    ],
    ids=str,
)
def test_bad_option_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        small(**options)
