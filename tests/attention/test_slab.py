"""Simplified linear attention is focused attention with four other defaults, and equals SLAB's code."""

import torch

from linvit import Grid
from linvit.attention.slab import SimplifiedLinearAttention
from tests.golden_files import Golden, attention_layer, both_precisions, check_layer_gradients, of_case
from tests.helpers import inputs, mechanism

OFFICIAL = {"focus": False, "learn_scale": False, "relu_eps": 0.0, "denominator": "sum"}


def test_it_is_focused_attention_with_four_options() -> None:
    """Whose own tests hold it to the formula; each option can be set back."""
    grid = Grid((4, 5), num_prefix=1)
    for options in ({}, {"focus": True, "learn_scale": True, "dwc_kernel": 3}):
        slab, focused = (mechanism({"name": n, **o, **options}, grid) for n, o in (("slab", {}), ("focused", OFFICIAL)))
        given = inputs(slab, grid)
        assert torch.equal(given(slab, grid), given(focused, grid))


@both_precisions
@of_case("slab_core")
def test_equals_slab(golden: Golden, dtype: torch.dtype) -> None:
    """One file is of so few tokens that the official code forms the matrix."""
    q, k, v = given = golden.inputs(dtype)
    grid = Grid((golden.kwargs["H"], golden.kwargs["W"]))
    module = SimplifiedLinearAttention(16, 2, grid).to(dtype)
    module.load_state_dict(golden.parameters())
    golden.check_call(module(q, k, v, grid), given)
    golden.check_parameters(module, str)


@both_precisions
@of_case("slab_pvt")
def test_layer_equals_slabs_under_spatial_reduction(golden: Golden, dtype: torch.dtype) -> None:
    (x,) = given = golden.inputs(dtype)
    size = golden.kwargs["H"], golden.kwargs["W"]
    layer = attention_layer(golden, "slab", size, dtype)
    golden.check_call(layer(x, Grid(size)), given)
    check_layer_gradients(golden, layer)
