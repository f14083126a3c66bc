"""Softmax attention equals timm's layer and the formula, biases and masks included."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from linvit import Grid
from tests.attention.rotary_formula import lepe, rotated
from tests.golden_files import Golden, attention_layer, both_precisions, check_layer_gradients, of_case
from tests.helpers import assert_near, assert_same_gradients, inputs, mechanism, randn

GRID = Grid((3, 5), kv_size=(2, 3), num_prefix=1)


def naive(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None = None) -> Tensor:
    """`o_n = sum_m exp(s q_n.k_m + b_nm) v_m / sum_m exp(s q_n.k_m + b_nm)`."""
    logits = scale * torch.einsum("bhnd,bhmd->bhnm", q, k)
    weights = torch.exp(logits if bias is None else logits + bias)
    return torch.einsum("bhnm,bhmd->bhnd", weights / weights.sum(-1, keepdim=True), v)


@both_precisions
@of_case("timm_mha")
@pytest.mark.parametrize("fused", [True, False])
def test_equals_timm(golden: Golden, fused: bool, dtype: torch.dtype) -> None:
    (x,) = inputs_ = golden.inputs(dtype)
    size = (x.shape[1], 1)
    layer = attention_layer(golden, {"name": "softmax", "fused": fused}, size, dtype)
    golden.check_call(layer(x, Grid(size)), inputs_)
    check_layer_gradients(golden, layer)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("key_dim", "scale"), [(None, None), (4, None), (None, 0.7)])
def test_equals_formula(fused: bool, biased: bool, key_dim: int | None, scale: float | None) -> None:
    module = mechanism({"name": "softmax", "fused": fused, "qk_scale": scale}, GRID, key_dim=key_dim)
    given = inputs(module, GRID, grad=True)
    bias = randn(1, module.num_heads, GRID.num_queries, GRID.num_keys, seed=5, grad=True) if biased else None
    factor = module.key_dim**-0.5 if scale is None else scale
    sources = [*given.tensors, bias] if biased else given.tensors
    got = module(given.q, given.k, given.v, GRID, bias=bias)
    assert_same_gradients(got, naive(given.q, given.k, given.v, factor, bias), sources, 1e-12)


@pytest.mark.parametrize("fused", [True, False])
def test_qk_norm_is_a_layer_norm_per_head(fused: bool) -> None:
    module = mechanism({"name": "softmax", "qk_norm": True, "fused": fused}, GRID)
    q, k, v, _ = given = inputs(module, GRID)
    q, k = (
        F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias) for x, norm in ((q, module.q_norm), (k, module.k_norm))
    )
    assert_near(given(module, GRID), naive(q, k, v, module.scale), 1e-12)


@pytest.mark.parametrize("fused", [True, False])
def test_equals_formula_with_positions_and_convolution(fused: bool) -> None:
    """The softmax attention of RAVLT's stages 3 and 4."""
    module = mechanism({"name": "softmax", "rotary": True, "lepe_kernel": 3, "fused": fused}, GRID)
    given = inputs(module, GRID, grad=True)
    q, k = rotated(given.q, GRID, GRID.size), rotated(given.k, GRID, GRID.keys_size)
    want = naive(q, k, given.v, module.scale) + lepe(module, given.v, GRID)
    assert_same_gradients(given(module, GRID), want, [*given.tensors, *module.parameters()], 1e-10)


@pytest.mark.parametrize("fused", [True, False])
def test_weights_are_dropped_in_training_only(fused: bool) -> None:
    module = mechanism({"name": "softmax", "attn_drop": 0.5, "fused": fused}, GRID)
    q, k, v, _ = inputs(module, GRID)
    assert_near(module(q, k, v, GRID), naive(q, k, v, module.scale), 1e-12)
    torch.manual_seed(0)
    dropped = torch.stack([module.train()(q, k, v, GRID) for _ in range(400)])
    assert_near(dropped.mean(0), module.eval()(q, k, v, GRID), 0.2)  # unbiased, to sampling error
    assert dropped.std(0).min() > 0
