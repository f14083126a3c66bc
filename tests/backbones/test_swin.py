"""Swin equals Microsoft's, FLatten's and timm's code; the presets have the published sizes."""

from typing import Any

import pytest
import torch
from timm.models.swin_transformer import SwinTransformer
from torch import Tensor

import linvit
from linvit.attention.focused import FocusedAttention
from linvit.attention.softmax import SoftmaxAttention
from linvit.backbones.swin import PatchMerging, Swin
from linvit.weights.fit import fit_projections
from linvit.weights.layouts.backbones import SWIN, SWIN_TIMM
from tests.golden_files import Golden, both_precisions, of_case
from tests.helpers import assert_near, assert_same_gradients, perturb, randn, relative_error
from tests.official import swin as official

SIZES = {"img_size": 64, "embed_dim": 12, "depths": [2, 2], "num_heads": [2, 3], "window_size": 4, "num_classes": 7}


def swin(**options: Any) -> Swin:
    """A small Swin in evaluation mode."""
    torch.manual_seed(0)
    return Swin(**{**SIZES, **options}).eval()


def image(*size: int, dtype: torch.dtype = torch.float64, grad: bool = False) -> Tensor:
    return randn(2, 3, *size, dtype=dtype, grad=grad)


def timm_and_ours(size: tuple[int, int], **options: Any) -> tuple[SwinTransformer, Swin]:
    """timm's model away from its initial values, and ours with the same weights, in float64."""
    sizes = {**SIZES, "img_size": size, **options}
    torch.manual_seed(0)
    theirs = perturb(SwinTransformer(**sizes, drop_path_rate=0.0).double().eval(), scale=0.1)
    ours = swin(**{**options, "img_size": size}).double()
    ours.load_state_dict(SWIN_TIMM.translate(theirs.state_dict()))
    return theirs, ours


# The references


def built(golden: Golden) -> Swin:
    """Our model for an official constructor."""
    given = golden.constructor
    if golden.meta["case"] != "swin_timm":  # softmax stages have windows of 7 whatever window_size says
        kinds = {"L": ("focused", given["window_size"]), "S": ("softmax", 7)}
        stages = [kinds[letter] for letter in given.pop("attn_type")]
        given["attention"] = [
            {"name": "focused", "focusing_factor": given["focusing_factor"], "dwc_kernel": given["kernel_size"]}
            if name == "focused"
            else name
            for name, _ in stages
        ]
        given["window_size"] = [window for _, window in stages]
        given.pop("focusing_factor", None)
        given.pop("kernel_size", None)
        given["norm_eps"] = {None: 1e-5, "LayerNorm(eps=1e-6)": 1e-6}[given.pop("norm_layer", None)]
    return Swin(**given)


@both_precisions
@of_case("swin", "flatten_swin", "swin_timm")
def test_equals_the_reference(golden: Golden, dtype: torch.dtype) -> None:
    layout = SWIN_TIMM if golden.meta["case"] == "swin_timm" else SWIN
    assert [known.name for known in (SWIN, SWIN_TIMM) if known.recognises(golden.parameters())] == [layout.name]
    model = built(golden).to(dtype).eval()
    model.load_state_dict(fit_projections(layout.translate(golden.parameters()), model))
    (x,) = inputs = golden.inputs(dtype)
    golden.check_call(model(x), inputs)
    _, features = model.forward_intermediates(x)
    for i in range(len(golden.named("feature."))):
        golden.check(f"feature.{i}", features[i])
    for i in range(len(golden.named("stage."))):  # the official stage ends with the merging for the next
        merged = i + 1 < len(features)
        stage = model.stages[i + 1].embed(features[i])[0] if merged else features[i].flatten(2).mT
        golden.check(f"stage.layers.{i}.output", stage)


@pytest.mark.parametrize(
    ("size", "options"),
    [
        ((64, 96), {}),
        ((128, 192), {"depths": [2, 2, 2], "num_heads": [1, 2, 3]}),
        ((72, 88), {"depths": [1, 1, 1], "num_heads": [1, 2, 3]}),  # padded merging, padded windows
        ((64, 96), {"qkv_bias": False, "mlp_ratio": 2.5}),
        ((32, 48), {"patch_size": 2}),
    ],
    ids=str,
)
def test_equals_timm(size: tuple[int, int], options: dict[str, Any]) -> None:
    """Gradients included. (timm pads a shifted map after the roll, the reference before: not compared.)"""
    theirs, ours = timm_and_ours(size, **options)
    x = image(*size, grad=True)
    assert_same_gradients(ours(x), theirs(x), [x], 1e-10)
    for norm in (False, True):
        want = theirs.forward_intermediates(x, norm=norm, intermediates_only=True)
        for got, feature in zip(ours.forward_intermediates(x, norm=norm, intermediates_only=True), want, strict=True):
            assert_near(got, feature, 1e-10)
    if options.get("patch_size", 4) == 4:
        assert ours.feature_info == [{**info, "module": f"stages.{i}"} for i, info in enumerate(theirs.feature_info)]


# Official files


def test_second_version_of_swin_is_another_layout() -> None:
    keys = [*official.swin(**official.SIZES["tiny"]), "layers.0.blocks.0.attn.logit_scale"]
    assert not SWIN.recognises(keys)


# Variants


@pytest.mark.parametrize("name", ["flatten_swin_tiny", "flatten_swin_base_384"])
def test_flatten_is_focused_on_the_whole_map_in_the_first_stages(name: str) -> None:
    with torch.device("meta"):
        model = linvit.create_backbone(name)
    side = 96 if name.endswith("384") else 56
    for i, stage in enumerate(model.stages):
        for j, block in enumerate(stage.blocks):
            layer, size = block.attn, (side // 2**i,) * 2
            assert isinstance(layer.mechanism, FocusedAttention if i < 2 else SoftmaxAttention)
            window = size if i < 2 else (12, 12) if side == 96 else (7, 7)
            assert layer.mechanism.grid.size == window
            half = window[0] // 2 if j % 2 else 0
            assert layer.windows(size)[:4] == (size, window, half if i == 2 else 0, 1)
            assert layer.windows((99, 77))[:4] == ((99, 77), *(((99, 77), 0) if i < 2 else (window, half)), 1)


# Attention, sizes, windows


@torch.no_grad()
def test_built_for_another_size_is_the_same_model() -> None:
    """Where no window shrinks, the nominal size leaves no trace on softmax."""
    small, large = swin(img_size=32), swin(img_size=(256, 96))
    large.load_state_dict(small.state_dict())
    assert torch.equal(small(image(100, 84, dtype=torch.float32)), large(image(100, 84, dtype=torch.float32)))


def test_whole_map_by_number_is_the_whole_map() -> None:
    """At the nominal size; at another one a number is a window of that side."""
    by_none, by_number = (swin(attention="focused", window_size=window).double() for window in (None, 56))
    by_number.load_state_dict(by_none.state_dict())
    assert torch.equal(by_number(image(64, 64)), by_none(image(64, 64)))
    assert relative_error(by_number(image(96, 96)), by_none(image(96, 96))) > 1e-6


def test_merging_joins_in_the_order_of_the_reference() -> None:
    """(0, 0), (1, 0), (0, 1), (1, 1) of row and column; the border of odd sides is zero."""
    merging = perturb(PatchMerging(5, 1e-5).double())
    x = randn(2, 5, 3, 5)
    padded = torch.zeros(2, 5, 4, 6, dtype=torch.float64)
    padded[:, :, :3, :5] = x
    parts = [padded[:, :, row::2, column::2] for column in (0, 1) for row in (0, 1)]
    got, size = merging(x)
    assert size == (2, 3)
    assert_near(got, merging.proj(merging.norm(torch.cat(parts, 1).flatten(2).mT)), 1e-14)


def test_every_block_may_have_a_window_of_its_own() -> None:
    model = swin(attention=["agent", "softmax", "agent", "softmax"], window_size=[None, 8, 4, 2])
    layers = [block.attn for stage in model.stages for block in stage.blocks]
    assert [layer.whole_map for layer in layers] == [True, False, False, False]
    assert [layer.window[0] for layer in layers] == [16, 8, 4, 2]


# Training


def test_relative_positions_are_an_option() -> None:
    with_tables, without = swin(), swin(rel_pos_bias=False)
    tables = with_tables.no_weight_decay()
    assert len(tables) == sum(len(stage.blocks) for stage in with_tables.stages)
    assert {*with_tables.state_dict()} - {*without.state_dict()} == tables
    state = {name: torch.zeros_like(t) if name in tables else t for name, t in with_tables.state_dict().items()}
    with_tables.load_state_dict(state)
    without.load_state_dict(state, strict=False)
    x = image(64, 52, dtype=torch.float32)
    assert_near(without(x), with_tables(x), 1e-5)
