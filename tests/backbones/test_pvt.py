"""PVT and FLatten-PVT equal the official classes, and carry any attention over images of any size."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import linvit
from linvit import UserError
from linvit.attention.focused import FocusedAttention
from linvit.backbones.pvt import PVT
from linvit.weights.fit import fit_projections
from linvit.weights.layouts.backbones import PVT as LAYOUT
from tests.golden_files import Golden, both_precisions, focused_spec, of_case
from tests.helpers import assert_near, perturb, randn
from tests.official import fill, images
from tests.official.pvt import VARIANTS, pvt
from tests.official.pvt_v2 import pvt_v2

SIZES = {
    "img_size": 64,
    "num_classes": 7,
    "embed_dims": (16, 32, 40, 48),
    "depths": (1, 2, 1, 1),
    "num_heads": (1, 2, 5, 4),
    "mlp_ratios": (4, 4, 2, 2),
}
FLATTEN: dict[str, Any] = {
    "attention": "focused",
    "sr_ratios": (1, 1, 1, 1),
    "class_token": False,
    "global_pool": "avg",
    "final_norm": False,
}


def small(**options: Any) -> PVT:
    """A small PVT in evaluation mode."""
    torch.manual_seed(0)
    return PVT(**{**SIZES, **options}).eval()


def image(*size: int, batch: int = 2, dtype: torch.dtype = torch.float64, grad: bool = False) -> Tensor:
    return randn(batch, 3, *size, dtype=dtype, grad=grad)


def load_official(model: PVT, official: dict[str, Tensor]) -> None:
    assert LAYOUT.recognises(official)
    model.load_state_dict(fit_projections(LAYOUT.translate(official), model))


def options_of(golden: Golden) -> dict[str, Any]:
    """Our constructor arguments for an official constructor."""
    official = golden.constructor
    options = {name: official[name] for name in (*SIZES, "qkv_bias")}
    if "attn_type" not in official:
        return options | {"sr_ratios": official["sr_ratios"]}
    linear = [letter == "L" for letter in official["attn_type"]]
    ratios = zip(linear, official["la_sr_ratios"], official.get("sr_ratios", [8, 4, 2, 1]), strict=True)
    return {
        **options,
        **FLATTEN,
        "attention": [focused_spec(golden) if is_linear else "softmax" for is_linear in linear],
        "sr_ratios": [int(focused) if is_linear else softmax for is_linear, focused, softmax in ratios],
    }


# The references


@both_precisions
@of_case("pvt", "flatten_pvt")
def test_equals_pvt(golden: Golden, dtype: torch.dtype) -> None:
    model = PVT(**options_of(golden)).to(dtype).eval()
    load_official(model, golden.parameters())
    (x,) = inputs = golden.inputs(dtype)
    golden.check_call(model(x), inputs)
    tokens, _, _ = model.forward_levels(x)
    golden.check("stage.block4.output", tokens)
    for i, feature in enumerate(model.forward_intermediates(x, [0, 1, 2], intermediates_only=True)):
        golden.check(f"stage.patch_embed{i + 2}.input", feature)


@both_precisions
@of_case("pvt_dense")
def test_equals_dense_pvt(golden: Golden, dtype: torch.dtype) -> None:
    """Dense tasks have no class token, though its position, and take features without the final norm."""
    model = PVT(**options_of(golden) | {"num_classes": 0, **PVT.dense}).to(dtype).eval()
    state = fit_projections(LAYOUT.translate(golden.parameters()), model)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == ["norm.weight", "norm.bias"]
    assert unexpected == []
    (x,) = inputs = golden.inputs(dtype)
    features = model.forward_intermediates(x, intermediates_only=True)
    for i, feature in enumerate(features):
        golden.check(f"feature.{i}", feature)
    golden.check_call(features[-1], inputs)


@pytest.mark.parametrize(
    ("name", "size", "first", "total", "mean_abs", "second"),
    [  # the official classes in float64: logits of the first image, sum and mean |.| of all, logit of the second image
        pytest.param(
            "pvt_tiny",
            (224, 224),
            (0.11791222, 0.095549863, -0.5879812, 0.63741668),
            -17.037417,
            0.36246129,
            -0.14432164,
            marks=pytest.mark.slow,
        ),
        (
            "pvt_tiny",
            (256, 320),
            (0.12417038, 0.069322604, -0.78437197, 0.94985264),
            -18.955151,
            0.36584671,
            0.32908188,
        ),
        pytest.param(
            "flatten_pvt_tiny",
            (224, 224),
            (0.13368815, 0.15465117, -0.20752287, 0.039385001),
            -2.252192,
            0.10068707,
            0.064595928,
            marks=pytest.mark.slow,
        ),
    ],
)
@torch.no_grad()
def test_equals_the_published_sizes(
    name: str, size: tuple[int, int], first: tuple[float, ...], total: float, mean_abs: float, second: float
) -> None:
    model = linvit.create_backbone(name).double().eval()
    load_official(model, fill(pvt(**VARIANTS[name])))
    logits = model(images(*size))
    got = [*logits[0, :4].tolist(), logits.sum().item(), logits.abs().mean().item(), logits[1, 0].item()]
    assert got == pytest.approx([*first, total, mean_abs, second], rel=1e-7)


@pytest.mark.parametrize("name", VARIANTS)
def test_official_names_are_all_of_the_models(name: str) -> None:
    with torch.device("meta"):
        model = linvit.create_backbone(name)
        official = {key: torch.empty(shape) for key, shape in pvt(**VARIANTS[name]).items()}
    state = fit_projections(LAYOUT.translate(official), model)
    assert {key: t.shape for key, t in state.items()} == {key: t.shape for key, t in model.state_dict().items()}


def test_layout_is_told_from_its_relatives() -> None:
    assert LAYOUT.recognises(pvt())
    assert LAYOUT.recognises(pvt(**VARIANTS["flatten_pvt_tiny"]))
    assert not LAYOUT.recognises(pvt_v2())
    assert not LAYOUT.recognises(small().state_dict())
    soft = [key.replace("attn.", "att.mha.") for key in pvt() if not key.startswith("block4")]
    assert not LAYOUT.recognises(soft)


# Other image sizes


@pytest.mark.parametrize("class_token", [True, False])
@pytest.mark.parametrize("size", [(224, 224), (448, 448), (112, 448), (896, 32), (97, 131)], ids=str)
@torch.no_grad()
def test_positions_are_interpolated_from_each_stages_own_grid(size: tuple[int, int], class_token: bool) -> None:
    """At 448 x 448 stage 2 has as many tokens as stage 1 at 224, at 112 x 448 stage 1 has; neither is its own grid."""
    model = small(img_size=224, attention="hydra", class_token=class_token, global_pool="avg").double()
    embedded: list[Tensor] = []
    entered: list[Tensor] = []
    for stage in model.stages:
        stage.embed.register_forward_hook(lambda _, __, out: embedded.append(out[0]))
        stage.blocks[0].register_forward_pre_hook(lambda _, inputs: entered.append(inputs[0]))
    model(image(*size, batch=1))
    height, width = size
    for i, stage in enumerate(model.stages):
        stride, prefix = 4 if i == 0 else 2, int(class_token and i == 3)
        height, width = -(-height // stride), -(-width // stride)
        own = 56 // 2**i
        table = stage.pos_embed[0, prefix:].reshape(1, own, own, -1).permute(0, 3, 1, 2)
        want = F.interpolate(table, (height, width), mode="bilinear", align_corners=False)
        want = embedded[i] + want.flatten(2).mT
        assert_near(entered[i][:, prefix:], want, 1e-12)
        if prefix:
            assert_near(entered[i][:, :1], stage.cls_token + stage.pos_embed[:, :1], 1e-12)


# Attention


def mechanisms(model: nn.Module) -> list[str]:
    return [type(block.attn.mechanism).__name__ for stage in model.stages for block in stage.blocks]


def ratios(model: nn.Module) -> list[int]:
    return [block.attn.sr.ratio if block.attn.sr else 1 for stage in model.stages for block in stage.blocks]


def test_attention_per_stage_and_per_block() -> None:
    per_stage = small(attention=["focused", "linear", "softmax", {"name": "softmax"}])
    assert mechanisms(per_stage) == ["FocusedAttention", *["LinearAttention"] * 2, *["SoftmaxAttention"] * 2]
    per_block = small(attention=["focused", "linear", "softmax", {"name": "focused", "focusing_factor": 4}, "hydra"])
    assert mechanisms(per_block) == [
        "FocusedAttention",
        "LinearAttention",
        "SoftmaxAttention",
        "FocusedAttention",
        "HydraAttention",
    ]
    assert per_block.stages[2].blocks[0].attn.mechanism.focusing_factor == 4


def test_mechanisms_are_built_for_the_grid_of_their_block() -> None:
    model = small(img_size=(64, 96), attention="focused")
    grids = [stage.blocks[-1].attn.mechanism.grid for stage in model.stages]
    assert grids == [((16, 24), (2, 3), 0), ((8, 12), (2, 3), 0), ((4, 6), (2, 3), 0), ((2, 3), None, 1)]


@pytest.mark.parametrize(
    ("attention", "sr_ratios", "want"),
    [
        ("softmax", None, [8, 4, 4, 2, 1]),
        ("soft", None, [1, 1, 1, 1, 1]),
        ("poly_nl", None, [1, 1, 1, 1, 1]),
        ("linear_angular", None, [1, 1, 1, 1, 1]),
        (["focused", "softmax", {"name": "soft_norm"}, "linear", "soft"], None, [8, 4, 1, 2, 1]),
        ("linear", [4, 1, 2, 2], [4, 1, 1, 2, 2]),
        ("soft", (1, 1, 1, 1), [1, 1, 1, 1, 1]),
        ({"name": "nystrom", "conv_kernel": 3}, None, [1, 1, 1, 1, 1]),  # options change what a mechanism can do
        ({"name": "soft", "tie_qk": False}, None, [8, 4, 4, 2, 1]),
        ({"name": "poly_nl", "project_q": True}, None, [8, 4, 4, 2, 1]),
    ],
)
def test_spatial_reduction(attention: Any, sr_ratios: Any, want: list[int]) -> None:
    """8, 4, 2, 1 where the mechanism can attend to fewer keys; what is listed holds for all blocks of a stage."""
    model = small(attention=attention, sr_ratios=sr_ratios)
    assert ratios(model) == want
    assert model(image(64, 64, dtype=torch.float32)).isfinite().all()


@pytest.mark.parametrize("name", ["flatten_pvt_tiny", "flatten_pvt_large"])
def test_flatten_is_focused_in_every_block_without_reduction(name: str) -> None:
    with torch.device("meta"):
        model = linvit.create_backbone(name)
    assert set(mechanisms(model)) == {FocusedAttention.__name__}
    assert set(ratios(model)) == {1}
    for stage in model.stages:
        assert stage.cls_token is None
        for block in stage.blocks:
            assert block.attn.mechanism.focusing_factor == 3
            assert block.attn.mechanism.dwc.kernel_size == (5, 5)


# Tokens and norms


def test_class_token_joins_in_the_last_stage() -> None:
    model = small()
    assert [stage.cls_token is not None for stage in model.stages] == [False, False, False, True]
    tokens = model.forward_features(image(64, 96, dtype=torch.float32))
    assert tokens.shape == (2, 1 + 2 * 3, 48)
    assert torch.equal(model.forward_head(tokens, pre_logits=True), tokens[:, 0])
    mean = small(global_pool="avg")
    assert torch.equal(mean.forward_head(tokens, pre_logits=True), tokens[:, 1:].mean(1))


def test_final_norm_that_is_not_applied_is_neither_trained() -> None:
    model = perturb(small(class_token=False, global_pool="avg", final_norm=False))
    x = image(64, 64, dtype=torch.float32)
    assert torch.equal(model.forward_features(x), model.forward_levels(x)[0])
    assert model.state_dict().keys() >= {"norm.weight", "norm.bias"}
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["norm.weight", "norm.bias"]
    model(x).sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == ["norm.weight", "norm.bias"]


@torch.no_grad()
def test_features() -> None:
    model = small().double()
    x = image(64, 96)
    assert model.feature_info == [
        {"module": f"stages.{i}", "num_chs": dim, "reduction": reduction}
        for i, (dim, reduction) in enumerate(zip(SIZES["embed_dims"], (4, 8, 16, 32), strict=True))
    ]
    last, features = model.forward_intermediates(x, norm=True)
    assert torch.equal(last, model.forward_features(x))
    assert torch.equal(features[-1].flatten(2).mT, last[:, 1:])
    raw = model.forward_intermediates(x, intermediates_only=True)
    assert torch.equal(model.norm(raw[-1].flatten(2).mT), last[:, 1:])
    for feature, same in zip(features[:-1], raw[:-1], strict=True):
        assert torch.equal(feature, same)


# Training


def test_stochastic_depth_grows_linearly_over_all_stages() -> None:
    model = small(depths=(1, 2, 1, 1), drop_path_rate=0.4)
    blocks = [block for stage in model.stages for block in stage.blocks]
    assert [block.drop_path1.drop_prob for block in blocks] == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])
    assert [block.drop_path2.drop_prob for block in blocks] == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])


def test_only_the_class_token_is_spared_from_decay() -> None:
    assert small().no_weight_decay() == {"stages.3.cls_token"}
    assert small().no_weight_decay() <= dict(small().named_parameters()).keys()
    assert small(**FLATTEN).no_weight_decay() == set()


def test_initial_values() -> None:
    torch.manual_seed(0)
    model = PVT(depths=(1, 1, 1, 1), attention=["softmax", "focused", "softmax", "softmax"])
    assert model.stages[3].cls_token.std().item() == pytest.approx(0.02, rel=0.15)
    for stage in model.stages:
        assert stage.pos_embed.std().item() == pytest.approx(0.02, rel=0.03)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            assert module.weight.std().item() == pytest.approx(0.02, rel=0.05), name
            assert module.bias.eq(0).all(), name
        if isinstance(module, nn.LayerNorm):
            assert module.eps == (1e-5 if "embed" in name or "attn.sr" in name else 1e-6), name
            assert module.weight.eq(1).all(), name
            assert module.bias.eq(0).all(), name
    for conv in (model.stages[1].embed.proj, model.stages[0].blocks[0].attn.sr.conv):
        bound = conv.weight[0].numel() ** -0.5  # torch's default: uniform within 1 / sqrt(fan in)
        assert 0.99 * bound < conv.weight.abs().max() <= bound
    focused = model.stages[1].blocks[0].attn.mechanism
    assert focused.scale.eq(0).all()
    assert focused.positional_encoding.eq(0).all()
    assert 0.19 < focused.dwc.weight.abs().max() <= 0.2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depths": (2, 2)}, r"depths must list 4 values, one per stage; got \[2, 2\]"),
        ({"sr_ratios": [8]}, r"sr_ratios must list 4 values, one per stage; got \[8\]"),
        ({"attention": ["softmax", "linear"]}, r"lists 2 specs, but this backbone has 5 block\(s\) in 4 stage"),
        ({"attention": "soft", "sr_ratios": (8, 4, 2, 1)}, "keys are the queries .* use no spatial reduction"),
        ({"attention": "poly_nl", "sr_ratios": (8, 4, 2, 1)}, "PolyNLAttention projects 'kv'.* use sr_ratio=1"),
        ({"attention": "linear_angular", "sr_ratios": (8, 4, 2, 1)}, r"declares same_grid, so .* use sr_ratio=1"),
        ({"attention": "focussed"}, "Did you mean 'focused'"),
        ({"class_token": False}, "global_pool 'token' needs the class token"),
        ({"global_pool": "max"}, "global_pool must be one of token, avg; got 'max'"),
        ({"img_size": 16}, "sr_ratio 8 leaves nothing of a grid of 4x4; lower it"),
        ({"num_heads": (3, 2, 5, 4)}, "dim 16 is not divisible by num_heads 3"),
    ],
    ids=str,
)
def test_bad_option_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        small(**options)
