"""CSWin and FLatten-CSwin equal the official classes, dense ones included, and take any attention and any image."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import linvit
from linvit import Grid
from linvit.attention.focused import FocusedAttention
from linvit.attention.softmax import SoftmaxAttention
from linvit.backbones.cswin import CSWin
from linvit.weights.fit import fit_projections
from linvit.weights.layouts.backbones import CSWIN as LAYOUT
from tests.golden_files import Golden, both_precisions, of_case
from tests.helpers import assert_near, perturb, randn, relative_error
from tests.official import fill
from tests.official.cswin import cswin

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


# Training


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
