"""Swin equals Microsoft's, FLatten's and timm's code; the presets have the published sizes."""

from typing import Any

import pytest
import torch
from timm.models.swin_transformer import SwinTransformer
from torch import Tensor, nn

import linvit
from linvit import UserError
from linvit.attention.focused import FocusedAttention
from linvit.attention.softmax import SoftmaxAttention
from linvit.backbones.swin import PatchMerging, Swin
from linvit.weights.fit import fit_projections
from linvit.weights.layouts.backbones import SWIN, SWIN_TIMM
from tests.golden_files import Golden, both_precisions, of_case
from tests.helpers import assert_near, assert_same_gradients, perturb, randn, relative_error
from tests.official import fill, images
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
    ("name", "focused_stages", "values"),
    [  # first four logits of the first image, sum, mean of the absolute values, first logit of the second image
        pytest.param(
            "swin_tiny",
            0,
            [0.23618452, -0.011617991, 0.32869829, 0.071809204, -7.8216741, 0.18373654, 0.37925982],
            marks=pytest.mark.slow,
        ),
        (
            "flatten_swin_tiny",
            2,
            [0.22879061, -0.0058251337, 0.32479659, 0.11353554, -8.6211908, 0.18348287, 0.38370372],
        ),
    ],
)
def test_equals_values_of_the_official_code(name: str, focused_stages: int, values: list[float]) -> None:
    model = linvit.create_backbone(name).double().eval()
    state = fill(official.swin(**official.SIZES["tiny"], focused_stages=focused_stages))
    model.load_state_dict(SWIN.translate(state))
    with torch.inference_mode():
        out = model(images(224, 224))
    got = torch.stack([*out[0, :4], out.sum(), out.abs().mean(), out[1, 0]])
    assert got.tolist() == pytest.approx(values, rel=1e-6)


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


@pytest.mark.slow
def test_equals_timms_swin_tiny() -> None:
    theirs, ours = timm_and_ours((224, 224), **official.SIZES["tiny"], window_size=7)
    with torch.inference_mode():
        assert_near(ours(image(224, 224)), theirs(image(224, 224)), 1e-10)


# Official files


@pytest.mark.parametrize("focused_stages", [0, 2])
@pytest.mark.parametrize(("variant", "img_size", "window"), [("tiny", 224, 7), ("small", 224, 7), ("base", 384, 12)])
def test_official_names_and_shapes_are_the_models(
    variant: str, img_size: int, window: int, focused_stages: int
) -> None:
    prefix = "flatten_" if focused_stages else ""
    with torch.device("meta"):
        model = linvit.create_backbone(f"{prefix}swin_{variant}", img_size=img_size, **windows(window, focused_stages))
    own = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    for timm, layout in ((False, SWIN), (True, SWIN_TIMM)):
        sizes = {"img_size": img_size, "window_size": window, "focused_stages": focused_stages}
        shapes = official.swin(**official.SIZES[variant], **sizes, timm=timm)
        assert [known.name for known in (SWIN, SWIN_TIMM) if known.recognises(shapes)] == [layout.name]
        assert {layout.rename(name): shape for name, shape in shapes.items()} == own


def windows(side: int, focused_stages: int) -> dict[str, Any]:
    """The option for windows of that side, or for none in the focused stages."""
    return {"window_size": [None] * focused_stages + [side] * (4 - focused_stages)}


def test_buffers_of_official_files_are_dropped() -> None:
    keys = ["layers.0.blocks.1.attn.relative_position_index", "layers.0.blocks.1.attn_mask", "norm.weight"]
    assert list(SWIN.translate({key: torch.zeros(1) for key in keys})) == ["norm.weight"]


def test_second_version_of_swin_is_another_layout() -> None:
    keys = [*official.swin(**official.SIZES["tiny"]), "layers.0.blocks.0.attn.logit_scale"]
    assert not SWIN.recognises(keys)


def test_dense_prediction_files_have_a_norm_per_feature() -> None:
    model = swin(depths=[1] * 4, num_heads=[1] * 4, feature_norms=True)
    files = [f"norm{i}.{leaf}" for i in range(4) for leaf in ("weight", "bias")]
    assert {SWIN.rename(name) for name in files} == {
        name for name, _ in model.named_parameters() if name.startswith(("norm", "feature_norms"))
    }


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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["swin_tiny", "flatten_swin_tiny"])
@pytest.mark.parametrize("size", [(256, 320), (512, 512), (800, 1333)], ids=str)
@torch.inference_mode()
def test_presets_take_large_images(name: str, size: tuple[int, int]) -> None:
    model = linvit.create_backbone(name, num_classes=5).eval()
    assert model(randn(1, 3, *size, dtype=torch.float32)).isfinite().all()


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"window_size": [7, 7, 7]},
            r"lists 3 sides for 4 blocks in 2 stages. Give one for all, 2 of them \(one per stage\), or 4",
        ),
        ({"window_size": 0}, "a side of at least 1, such as 7, or null .* got 0"),
        ({"num_heads": [2]}, r"num_heads must list 2 values, one per stage; got \[2\]"),
        ({"num_heads": [5, 3]}, "dim 12 is not divisible by num_heads 5"),
        ({"attention": ["linear"] * 3}, r"attention lists 3 specs, but this backbone has 4 block\(s\) in 2 stage"),
        ({"img_size": [224]}, "img_size must be a positive side"),
    ],
    ids=str,
)
def test_bad_option_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        swin(**options)


# Features


def test_feature_norms_are_applied_to_features_only() -> None:
    plain, normed = swin(), swin(feature_norms=True)
    perturb(normed.double())
    plain.double().load_state_dict({k: t for k, t in normed.state_dict().items() if "feature_norms" not in k})
    x = image(64, 96)
    assert torch.equal(normed(x), plain(x))
    raw = normed.forward_intermediates(x, intermediates_only=True)
    got = normed.forward_intermediates(x, norm=True, intermediates_only=True)
    assert torch.equal(raw[0], plain.forward_intermediates(x, intermediates_only=True)[0])
    for feature, own, norm in zip(raw, got, [*normed.feature_norms, normed.norm], strict=True):
        assert_near(own, norm(feature.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), 1e-14)


@pytest.mark.parametrize(("prune_norm", "norms"), [(False, 1), (True, 0)])
def test_pruning_drops_the_norms_of_later_features(prune_norm: bool, norms: int) -> None:
    model = swin(depths=[1, 1, 1], num_heads=[1, 1, 1], feature_norms=True)
    assert model.prune_intermediate_layers([0], prune_norm=prune_norm) == [0]
    assert len(model.stages) == 1
    assert len(model.feature_norms) == norms


# Training


def test_no_weight_decay_for_relative_positions() -> None:
    names = swin(attention=["linear", "softmax"]).no_weight_decay()
    assert names == {f"stages.1.blocks.{i}.attn.relative_position_bias_table" for i in range(2)}


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


def test_initial_values() -> None:
    torch.manual_seed(0)
    model = Swin(embed_dim=96, depths=[1, 1], num_heads=[3, 6], feature_norms=True)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            assert module.weight.std().item() == pytest.approx(0.02, rel=0.03), name
            assert module.bias is None or module.bias.eq(0).all(), name
        if isinstance(module, nn.LayerNorm):
            assert module.eps == 1e-5, name
            assert module.weight.eq(1).all(), name
            assert module.bias.eq(0).all(), name
    assert model.stages[1].embed.proj.bias is None


def test_norm_eps_is_that_of_all_norms() -> None:
    model = swin(norm_eps=1e-3, feature_norms=True)
    assert {module.eps for module in model.modules() if isinstance(module, nn.LayerNorm)} == {1e-3}
