"""CSWin and FLatten-CSwin equal the official classes, dense ones included, and take any attention and any image."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linvit
from linvit import Grid, UserError
from linvit.attention.focused import FocusedAttention
from linvit.attention.softmax import SoftmaxAttention
from linvit.backbones.cswin import CSWin
from linvit.weights.fit import fit_projections
from linvit.weights.layouts.backbones import CSWIN as LAYOUT
from tests.golden_files import Golden, both_precisions, of_case
from tests.helpers import assert_near, perturb, randn, relative_error
from tests.official import fill, images
from tests.official.cswin import MODELS, cswin

SMALL = {"embed_dim": 8, "depths": (1, 2, 1, 1), "num_heads": (2, 2, 4, 4), "num_classes": 7, "img_size": 64}


def small(**options: Any) -> CSWin:
    """A small CSWin in evaluation mode."""
    torch.manual_seed(0)
    return CSWin(**{**SMALL, **options}).eval()


def image(*size: int, batch: int = 1, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    return randn(batch, 3, *size, dtype=dtype, grad=grad)


def load(model: CSWin, official: Mapping[str, Tensor]) -> CSWin:
    """Loads an official state dict and nothing else."""
    assert LAYOUT.recognises(official)
    model.load_state_dict(fit_projections(LAYOUT.translate(official), model))
    return model.eval()


# The references


def official_model(golden: Golden, dtype: torch.dtype, **options: Any) -> CSWin:
    """Our model for an official constructor, with its parameters."""
    official = golden.constructor
    names = {"embed_dim", "num_heads", "mlp_ratio", "img_size", "num_classes", "split_size"}
    own = {name: value for name, value in official.items() if name in names}
    return load(CSWin(**{**own, "depths": official["depth"], **options}).to(dtype), golden.parameters())


def check_stages(golden: Golden, model: CSWin, x: Tensor) -> None:
    """Holds the tokens that leave each stage, and the normalised last ones."""
    last, features = model.forward_intermediates(x, output_fmt="NLC")
    for i, tokens in enumerate(features[:3], start=1):
        golden.check(f"stage.merge{i}.input", tokens)
    golden.check("stage.norm.output", last)


@both_precisions
@of_case("cswin")
def test_equals_cswin(golden: Golden, dtype: torch.dtype) -> None:
    model = official_model(golden, dtype)
    (x,) = inputs = golden.inputs(dtype)
    golden.check_call(model(x), inputs)
    check_stages(golden, model, x)


@both_precisions
@of_case("flatten_cswin")
def test_equals_flatten_cswin(golden: Golden, dtype: torch.dtype) -> None:
    official = golden.constructor
    assert official["attn_type"] == "LLSS"
    focused = {
        "name": "focused",
        "focusing_factor": official["focusing_factor"],
        "dwc_kernel": official["kernel_size"],
    }
    model = official_model(
        golden,
        dtype,
        attention=[focused, focused, "softmax", "softmax"],
        split_size=[None, None, *official["split_size"][2:]],
    )
    (x,) = inputs = golden.inputs(dtype)
    golden.check_call(model(x), inputs)
    check_stages(golden, model, x)


@both_precisions
@of_case("cswin_dense")
def test_equals_dense_cswin(golden: Golden, dtype: torch.dtype) -> None:
    """Another image than the model is built for, not square, with padded stripes, and a norm per feature."""
    dims = [golden.tensors[f"param.norm{s}.weight"].numel() for s in (1, 2, 3, 4)]
    model = official_model(golden, dtype, embed_dim=dims, num_classes=0, feature_norms=True)
    (x,) = inputs = golden.inputs(dtype)
    features = model.forward_intermediates(x, norm=True, intermediates_only=True)
    for i, feature in enumerate(features):
        golden.check(f"feature.{i}", feature)
    golden.check_call(features[-1], inputs)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "first", "total", "mean", "second"),
    [  # first four logits of the first image, sum and mean absolute value of all, first logit of the second image
        pytest.param(
            "cswin_tiny",
            [0.063248203, -0.15178819, -0.23668129, -0.017876769],
            -4.4246263,
            0.097441375,
            -0.043140599,
            marks=pytest.mark.slow,
        ),
        (
            "flatten_cswin_tiny",
            [0.084720453, -0.13961716, -0.20334285, 0.026575389],
            -2.8346186,
            0.098244006,
            -0.023824658,
        ),
    ],
)
def test_equals_the_official_sizes(name: str, first: list[float], total: float, mean: float, second: float) -> None:
    model = load(linvit.create_backbone(name).double(), fill(MODELS[name]()))
    logits = model(images(224, 224))
    got = [*logits[0, :4].tolist(), logits.sum().item(), logits.abs().mean().item(), logits[1, 0].item()]
    assert got == pytest.approx([*first, total, mean, second], rel=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_layout_of_every_size_is_the_official_one(name: str) -> None:
    with torch.device("meta"):
        model = linvit.create_backbone(name, num_classes=5)
    official = MODELS[name](num_classes=5)
    assert LAYOUT.recognises(official)
    renamed = {LAYOUT.rename(key): shape for key, shape in official.items()}
    assert renamed == {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}


def test_layout_of_the_dense_class() -> None:
    official = cswin(8, SMALL["depths"], dense=True, num_classes=0)
    load(small(num_classes=0, feature_norms=True, img_size=224), fill(official))


def test_official_projections_fit_a_mechanism_without_keys() -> None:
    """Its qkv has the rows of q and v, the vertical half's before the horizontal half's."""
    model = small(attention="soft", img_size=224)
    official = fill(cswin(8, SMALL["depths"], num_classes=7))
    fitted = fit_projections(LAYOUT.translate(official), model)
    own = model.state_dict()
    given = official["stage1.0.qkv.weight"]
    key = "stages.0.blocks.0.attn.qkv.weight"
    assert fitted[key].shape == own[key].shape
    assert torch.equal(fitted[key], torch.cat([given[:8], given[16:]]))
    missing = own.keys() - fitted.keys()
    assert missing
    assert all(".mechanism." in name for name in missing)
    assert not fitted.keys() - own.keys()


# Variants


@pytest.mark.parametrize(
    ("name", "stripes"),
    [
        ("cswin_tiny", [(56, 1), (28, 2), (14, 7), (7, 7)]),
        ("cswin_base_384", [(96, 1), (48, 2), (24, 12), (12, 12)]),
        ("cswin_large_384", [(96, 1), (48, 2), (24, 12), (12, 12)]),
        ("flatten_cswin_tiny", [(56, 56), (28, 28), (14, 7), (7, 7)]),
        ("flatten_cswin_base_384", [(96, 96), (48, 48), (24, 12), (12, 12)]),
    ],
)
def test_stripes_of_the_sizes(name: str, stripes: list[tuple[int, int]]) -> None:
    with torch.device("meta"):
        model = linvit.create_backbone(name)
    attentions = [stage.blocks[-1].attn for stage in model.stages]
    for attn, stripe in zip(attentions, stripes, strict=True):
        want = [stripe] if stripe[0] == stripe[1] else [stripe, stripe[::-1]]
        assert [branch.mechanism.grid.size for branch in attn.branches] == want
    kind = FocusedAttention if name.startswith("flatten") else SoftmaxAttention
    kinds = [type(attn.branches[0].mechanism) for attn in attentions]
    assert kinds == [kind, kind, SoftmaxAttention, SoftmaxAttention]


def test_facts_of_the_pyramid() -> None:
    model = small()
    assert [info["num_chs"] for info in model.feature_info] == [8, 16, 32, 64]
    assert [info["reduction"] for info in model.feature_info] == [4, 8, 16, 32]
    assert (model.num_features, model.num_prefix_tokens, model.global_pool) == (64, 0, "avg")
    tokens = model.forward_features(image(64, 64))
    assert torch.equal(model.forward_head(tokens, pre_logits=True), tokens.mean(1))


# Any attention


def kinds(model: CSWin) -> list[list[type]]:
    """The mechanisms of the blocks of each stage."""
    return [[type(block.attn.branches[0].mechanism) for block in stage.blocks] for stage in model.stages]


# Any image


@torch.no_grad()
@pytest.mark.parametrize("size", [(97, 131), (98, 64), (95, 66)])
def test_mechanisms_are_built_for_the_grids_of_the_nominal_image(size: tuple[int, int]) -> None:
    """The stem rounds (side + 1) / 4 down, so 97 pixels make 24 patches."""
    model = small(img_size=size, split_size=(None,) * 4)
    features = model.forward_intermediates(image(*size), intermediates_only=True)
    for stage, feature in zip(model.stages, features, strict=True):
        for block in stage.blocks:
            assert block.attn.branches[0].mechanism.grid.size == stage.grid.size == feature.shape[2:]


def test_the_last_stage_has_one_branch_whatever_its_stripes() -> None:
    model = small(img_size=224, split_size=(1, 1, 1, 1))
    assert [len(stage.blocks[0].attn.branches) for stage in model.stages] == [2, 2, 2, 1]


@torch.no_grad()
def test_stages_of_one_branch_are_global_at_any_size() -> None:
    """A far pixel matters in a focused stage, and only along a cross in a stage of stripes."""
    for split, everywhere in [(None, True), (1, False)]:
        model = small(img_size=64, depths=(1, 1), num_heads=(2, 2), split_size=(split, 1), attention="focused")
        model = perturb(model.double(), scale=0.1)
        x = image(96, 128, dtype=torch.float64)
        other = x.clone()
        other[..., 48:52, 80:84] += 1
        near, far = (model.forward_intermediates(i, indices=[0], intermediates_only=True)[0] for i in (x, other))
        moved = (near - far).abs().amax((0, 1)) > 1e-9
        assert moved.shape == (24, 32)
        assert bool(moved.all()) is everywhere
        assert moved[12].all()
        assert moved[:, 20].all()


# Features


@torch.no_grad()
def test_feature_norms() -> None:
    model = perturb(small(feature_norms=True).double(), scale=0.1)
    x = image(64, 96, dtype=torch.float64)
    raw = model.forward_intermediates(x, output_fmt="NLC", intermediates_only=True)
    normed = model.forward_intermediates(x, output_fmt="NLC", intermediates_only=True, norm=True)
    for tokens, got, norm in zip(raw, normed, [*model.feature_norms, model.norm], strict=True):
        assert norm.eps == 1e-5
        assert_near(got, norm(tokens), 1e-12)
    plain = small().double()
    plain.load_state_dict({name: t for name, t in model.state_dict().items() if not name.startswith("feature_norms")})
    assert torch.equal(plain(x), model(x))
    features = plain.forward_intermediates(x, output_fmt="NLC", intermediates_only=True, norm=True)
    for got, want in zip(features, [*raw[:3], normed[3]], strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(("prune_norm", "left"), [(False, 2), (True, 0)])
def test_pruning_drops_feature_norms(prune_norm: bool, left: int) -> None:
    model = small(feature_norms=True)
    x = image(64, 64)
    want = model.forward_intermediates(x, indices=[0, 1], norm=not prune_norm, intermediates_only=True)
    assert model.prune_intermediate_layers([0, 1], prune_norm=prune_norm) == [0, 1]
    assert len(model.feature_norms) == left
    got = model.forward_intermediates(x, indices=[0, 1], norm=True, stop_early=True, intermediates_only=True)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# Training


def test_initial_values() -> None:
    model = small(embed_dim=96, attention=["focused", "softmax", "softmax", "softmax"], num_classes=1000)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            assert module.weight.std().item() == pytest.approx(0.02, rel=0.03), name
            assert module.bias.eq(0).all(), name
        if isinstance(module, nn.LayerNorm):
            assert module.eps == 1e-5, name
            assert module.weight.eq(1).all(), name
            assert module.bias.eq(0).all(), name
        if isinstance(module, nn.Conv2d):  # torch's default: uniform within 1 / sqrt(fan in)
            bound = module.weight[0].numel() ** -0.5
            assert 0.9 * bound < module.weight.abs().max() <= bound, name
    mechanism = model.stages[0].blocks[0].attn.branches[0].mechanism
    assert mechanism.scale.eq(0).all()
    assert mechanism.positional_encoding.eq(0).all()


def test_mechanisms_may_take_the_input_before_the_norm() -> None:
    """Where InLine makes its kernels of it."""
    options = {"attention": ["inline", "softmax", "softmax", "softmax"], "split_size": [None, 1, 1, 1]}
    models = [perturb(small(**options, input_before_norm=chosen).double()) for chosen in (False, True)]
    (without, block), grid = (model.stages[0].blocks[0] for model in models), Grid((4, 4))
    x = randn(2, 16, block.norm1.weight.shape[0])
    (branch,), layer = block.attn.branches, block.attn
    mixed = x + layer.proj(branch(list(layer.qkv(block.norm1(x)).chunk(3, dim=-1)), x, grid))
    assert_near(block(x, grid), mixed + block.mlp(block.norm2(mixed), grid), 1e-14)
    assert relative_error(without(x, grid), block(x, grid)) > 1e-3


def test_everything_with_axes_is_decayed() -> None:
    assert small(attention="focused").no_weight_decay() == set()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": (2, 4, 8)}, r"num_heads must list 4 values, one per stage; got \[2, 4, 8\]"),
        ({"split_size": (1, 2)}, "split_size must list 4 values, one per stage"),
        ({"embed_dim": [8, 16]}, "embed_dim must list 4 values, one per stage"),
        ({"split_size": (0, 2, 7, 7)}, "the width of a stripe must be at least 1, or None for the whole plane; got 0"),
        ({"num_heads": (1, 2, 4, 8)}, "got 1 heads and 8 channels"),
        ({"attention": ["softmax"] * 3}, r"attention lists 3 specs, but this backbone has 5 block\(s\) in 4 stage"),
        ({"img_size": (64, 64, 3)}, r"img_size must be a positive side"),
    ],
    ids=str,
)
def test_bad_option_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        small(**options)
