"""SOFT and SOFT++ equal their reference code; any attention takes the place of theirs; images of any size."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linvit
from linvit import Grid
from linvit.attention.soft import SoftAttention
from linvit.attention.soft_norm import SoftNormAttention
from linvit.attention.softmax import SoftmaxAttention
from linvit.backbones.soft import SOFT, PostNormBlock, softmax_free
from linvit.layers.block import Block
from linvit.weights.fit import fit_projections
from linvit.weights.layouts.backbones import SOFT as LAYOUT
from tests.golden_files import Golden, both_precisions, of_case
from tests.helpers import assert_near, randn

SIZES = {"embed_dims": (16, 24, 32, 40), "num_heads": (2, 2, 4, 5), "depths": (1, 1, 2, 1), "num_classes": 7}


def soft(**options: Any) -> SOFT:
    """A small SOFT in evaluation mode."""
    torch.manual_seed(0)
    return SOFT(**{**SIZES, "img_size": 64, **options}).eval()


def stages(name: str, **options: Any) -> list[Any]:
    """The papers' attention of the four stages, with more options in the first three."""
    *early, last = softmax_free(name)
    return [*({**spec, **options} for spec in early), last]


def reference_stages(name: str, **options: Any) -> list[Any]:
    """As the reference computes it: one alpha for the batch in SOFT++."""
    return stages(name, **options, **({"alpha_scope": "batch"} if name == "soft_norm" else {}))


def load_official(model: nn.Module, state: dict[str, Tensor]) -> None:
    model.load_state_dict(fit_projections(LAYOUT.translate(state), model), strict=True)


def image(*size: int, batch: int = 2, dtype: torch.dtype = torch.float64, grad: bool = False) -> Tensor:
    return randn(batch, 3, *size, dtype=dtype, grad=grad)


# The references


@both_precisions
@of_case("soft", "softpp")
def test_equals_the_reference(golden: Golden, dtype: torch.dtype) -> None:
    official = golden.constructor
    name = "soft" if golden.meta["case"] == "soft" else "soft_norm"
    model = SOFT(
        img_size=official["img_size"],
        num_classes=official["num_classes"],
        attention=reference_stages(name, newton_iters=official["newton_max_iter"]),
        embed_dims=official["embed_dims"],
        num_heads=official["num_heads"],
        depths=official["depths"],
        mlp_ratio=official["mlp_ratios"][3],
    )
    load_official(model, golden.parameters())
    model.to(dtype).eval()
    (x,) = inputs = golden.inputs(dtype)
    golden.check_call(model(x), inputs)
    _, features = model.forward_intermediates(x)
    for stage, feature in zip((2, 3, 4), features[:3], strict=True):
        golden.check(f"stage.patch_embed{stage}.input", feature)
    golden.check("stage.norm.output", model.forward_features(x))


def on_meta(name: str, **options: Any) -> SOFT:
    """A preset without memory or numbers."""
    with torch.device("meta"):
        model = linvit.create_backbone(name, **options)
    assert isinstance(model, SOFT)
    return model.eval()


# Blocks


@pytest.mark.parametrize("name", ["soft_tiny", "soft_norm_tiny"])
def test_presets_have_softmax_free_stages_and_a_softmax_stage(name: str) -> None:
    model = on_meta(name)
    kind = SoftNormAttention if name == "soft_norm_tiny" else SoftAttention
    for stage, ratio, conv_size in zip(model.stages, (8, 4, 2), (9, 5, 3), strict=False):
        for block in stage.blocks:
            assert type(block) is PostNormBlock
            assert type(block.attn.mechanism) is kind
            assert block.attn.mechanism.kernels.ratio == ratio
            assert block.attn.mechanism.conv.kernel_size == (conv_size, conv_size)
            assert block.attn.mechanism.inverse.iters == 20
            assert block.attn.mechanism.inverse.alpha_scope == "head"
    for block in model.stages[3].blocks:
        assert type(block) is Block
        assert type(block.attn.mechanism) is SoftmaxAttention


def test_mlp_ratio_is_that_of_the_last_stage() -> None:
    model = soft(mlp_ratio=2.5)
    layers = [stage.blocks[0].mlp.fc1 for stage in model.stages]
    assert [layer.out_features / layer.in_features for layer in layers] == [4, 4, 4, 2.5]


# Attention


def test_bare_name_is_for_the_last_stage_too() -> None:
    model = on_meta("soft_tiny", attention="soft")
    mechanisms = [stage.blocks[0].attn.mechanism for stage in model.stages]
    assert [type(mechanism) for mechanism in mechanisms] == [SoftAttention] * 4
    assert [mechanism.kernels.ratio for mechanism in mechanisms] == [8, 4, 2, 1]
    assert mechanisms[3].grid == Grid((7, 7), num_prefix=1)


# Sizes


def test_positions_are_interpolated_bilinearly() -> None:
    stage = soft().stages[3].double()
    stage.blocks = nn.ModuleList()
    stage.embed.forward = lambda x: (x, (2, 3))
    table = stage.pos_embed.detach()
    want = nn.functional.interpolate(table[:, 1:].mT.unflatten(2, (7, 7)), (2, 3), mode="bilinear", align_corners=False)
    tokens, grid = stage(torch.zeros(1, 6, 40))
    assert_near(grid.plane(tokens), want, 1e-12)
    assert_near(tokens[:, 0], table[:, 0] + stage.cls_token[:, 0], 1e-12)


# Training


def test_dropout_is_on_the_branches_in_training_only() -> None:
    block = soft(depths=(1, 1, 1, 2), drop_path_rate=0.8).stages[2].blocks[0].double()
    block.norm1, block.norm2 = nn.Identity(), nn.Identity()
    block.attn.forward = block.mlp.forward = lambda x, grid: torch.ones_like(x)
    x = randn(2, 9, 32)
    torch.manual_seed(0)
    added = block.train()(x, Grid((3, 3))) - x
    assert block.drop.p == pytest.approx(0.4)
    factors = (added * 0.6).round()  # 0, 1 or 2 of the branches kept, each divided by 0.6
    assert_near(added, factors / 0.6, 1e-7)  # the rates are float32
    assert len(factors[0, 0].unique()) == 3  # single entries of a token, not samples
    assert_near(block.eval()(x, Grid((3, 3))), x + 2, 1e-12)
