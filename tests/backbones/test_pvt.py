"""PVT and FLatten-PVT equal the official classes, and carry any attention over images of any size."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.backbones.pvt import PVT
from linvit.weights.fit import fit_projections
from linvit.weights.layouts.backbones import PVT as LAYOUT
from tests.golden_files import Golden, both_precisions, focused_spec, of_case
from tests.helpers import assert_near, perturb, randn

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


# Other image sizes


@pytest.mark.parametrize(("size", "class_token"), [((448, 448), True), ((112, 448), False), ((97, 131), True)], ids=str)
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


def ratios(model: nn.Module) -> list[int]:
    return [block.attn.sr.ratio if block.attn.sr else 1 for stage in model.stages for block in stage.blocks]


def test_mechanisms_are_built_for_the_grid_of_their_block() -> None:
    model = small(img_size=(64, 96), attention="focused")
    grids = [stage.blocks[-1].attn.mechanism.grid for stage in model.stages]
    assert grids == [((16, 24), (2, 3), 0), ((8, 12), (2, 3), 0), ((4, 6), (2, 3), 0), ((2, 3), None, 1)]


@pytest.mark.parametrize(
    ("attention", "sr_ratios", "want"),
    [
        ("softmax", None, [8, 4, 4, 2, 1]),
        ("soft", None, [1, 1, 1, 1, 1]),
        (["focused", "softmax", {"name": "soft_norm"}, "linear", "soft"], None, [8, 4, 1, 2, 1]),
        ("linear", [4, 1, 2, 2], [4, 1, 1, 2, 2]),
        ({"name": "soft", "tie_qk": False}, None, [8, 4, 4, 2, 1]),  # options change what a mechanism can do
    ],
)
def test_spatial_reduction(attention: Any, sr_ratios: Any, want: list[int]) -> None:
    """8, 4, 2, 1 where the mechanism can attend to fewer keys; what is listed holds for all blocks of a stage."""
    model = small(attention=attention, sr_ratios=sr_ratios)
    assert ratios(model) == want
    assert model(image(64, 64, dtype=torch.float32)).isfinite().all()


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
