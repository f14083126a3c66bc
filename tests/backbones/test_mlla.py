"""MLLA equals its reference code."""

from typing import Any

import pytest
import torch
from torch.func import functional_call

import linvit
from linvit import AttentionLayer, Grid
from linvit.backbones.mlla import MLLA
from linvit.layers.block import Block
from linvit.layers.mlp import Mlp
from linvit.weights.fit import fit_projections
from linvit.weights.layouts.backbones import MLLA as LAYOUT
from tests.golden_files import Golden, both_precisions, of_case, our_state
from tests.official import fill, images
from tests.official.mlla import mlla as official

SIZES = {"embed_dim": 16, "depths": (1, 1, 2, 1), "num_heads": (1, 2, 2, 4), "num_classes": 7, "img_size": 64}


def small(**options: Any) -> MLLA:
    """A small model in evaluation mode."""
    torch.manual_seed(0)
    model = linvit.create_backbone("mlla_tiny", **{**SIZES, **options})
    assert isinstance(model, MLLA)
    return model.eval()


@both_precisions
@of_case("mlla_block")
def test_block_equals_the_reference(golden: Golden, dtype: torch.dtype) -> None:
    options = golden.constructor
    dim, grid = options["dim"], Grid(tuple(options["input_resolution"]))
    layer = AttentionLayer(dim, options["num_heads"], grid, attention="mlla")
    block = Block(dim, layer, Mlp(dim, int(dim * options["mlp_ratio"])), 0, 1e-5, cpe=2).to(dtype)
    leaves = {name: leaf for name, leaf in golden.leaves(dtype).items() if name != "attn.rope.rotations"}
    state = fit_projections(our_state(leaves, LAYOUT, "layers.0.blocks.0.", "stages.0.blocks.0."), block)
    (x,) = inputs = golden.inputs(dtype)
    golden.check_call(functional_call(block, state, (x, grid)), inputs)
    golden.check_leaves(leaves)


@torch.no_grad()
def test_gives_the_reference_values() -> None:
    """Numbers of the official classes in float64, rotations too, for parameters that follow from their names."""
    model = small().double()
    state = fill(official(16, SIZES["depths"], classes=7), scale=0.2)
    model.load_state_dict(fit_projections(LAYOUT.translate(state), model))
    out = model(images(64, 64))
    want = [0.176553795648, 1.85147230059, -0.298706502842, -0.86506783405]
    assert [*out[0, :3].tolist(), out.sum().item()] == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("dense", [False, True])
def test_official_names_and_shapes_are_those_of_the_model(dense: bool) -> None:
    with torch.device("meta"):
        model = small(feature_norms=dense, **({"num_classes": 0} if dense else {}))
    shapes = official(16, SIZES["depths"], classes=7, dense=dense)
    shapes["layers.2.blocks.1.attn.rope.rotations"] = (14, 14, 32, 2)
    state = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
    assert LAYOUT.recognises(state)
    ours = fit_projections(LAYOUT.translate(state), model)
    want = {key: t.shape for key, t in model.state_dict().items() if not key.endswith("num_batches_tracked")}
    assert {key: t.shape for key, t in ours.items()} == want
