"""MLLA's block equals its reference code."""

import torch
from torch.func import functional_call

from linvit import AttentionLayer, Grid
from linvit.layers.block import Block
from linvit.layers.mlp import Mlp
from linvit.weights.fit import fit_projections
from linvit.weights.layouts.backbones import MLLA as LAYOUT
from tests.golden_files import Golden, both_precisions, of_case, our_state


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
