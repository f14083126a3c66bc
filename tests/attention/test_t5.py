"""T5's inner models equal the authors' code, and, option by option, a step of autograd on the inner loss."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import linvit
from linvit import AttentionLayer, Grid, UserError
from linvit.analysis import Recorder, attention_matrix
from linvit.attention.t5 import T5Attention
from tests.golden_files import Golden, both_precisions, of_case
from tests.helpers import assert_same_gradients, inputs, mechanism, options_then_grids, randn

MLP = {"inner_model": "silu_mlp"}
VARIANTS = {"t5": {}, "t5_v0": {**MLP, "conv": 0}, "t5_dit": {**MLP, "inner_loss": "mse"}}
OPTIONS = [*VARIANTS.values(), {"inner_loss": "mse", "inner_lr": 0.3}, {"key_norm": "none", "conv": 5}]
GRIDS = [Grid((3, 4), num_prefix=1), Grid((1, 7)), Grid((1, 1)), Grid((5, 2))]


def convolved(x: Tensor, conv: torch.nn.Module | None, grid: Grid) -> Tensor:
    """`x + conv(x)` for the patches of (B, h, N, d)."""
    if conv is None:
        return x
    plane = x[:, :, grid.num_prefix :].transpose(1, 2).flatten(2).mT.unflatten(2, grid.size)
    local = conv(plane).flatten(2).mT.unflatten(2, x.shape[1::2]).transpose(1, 2)
    return x + F.pad(local, (0, 0, grid.num_prefix, 0))


def inner(weights: list[Tensor], x: Tensor) -> Tensor:
    if len(weights) == 2:
        return F.silu(x @ weights[0]) @ weights[1]
    return (F.silu(x @ weights[0]) * (x @ weights[1])) @ weights[2]


def naive(module: T5Attention, options: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
    """f' by autograd of the inner loss, whose gradient is itself differentiated."""
    if options.get("key_norm") != "none":
        k = (k - k.mean(2, keepdim=True)) / (k.var(2, correction=0, keepdim=True) + 1).sqrt()
    q, k = convolved(q, module.q_conv2d, grid), convolved(k, module.k_conv2d, grid)
    weights = [w.expand(len(q), -1, -1, -1) for w in (module.w1, module.w2, module.w3) if w is not None]
    made, scale = inner(weights, k), 1 / (math.sqrt(q.shape[3]) * k.shape[2])
    loss = (made - v).square().sum() / 2 if options.get("inner_loss") == "mse" else -(made * v).sum()
    steps = torch.autograd.grad(scale * loss, weights, create_graph=True)
    return inner([w - options.get("inner_lr", 1) * g for w, g in zip(weights, steps, strict=True)], q)


@pytest.mark.parametrize(("options", "grid"), options_then_grids(OPTIONS, GRIDS), ids=str)
def test_equals_formula(options: dict[str, Any], grid: Grid) -> None:
    module = mechanism({"name": "t5", **options}, grid)
    assert isinstance(module, T5Attention)
    given = inputs(module, grid, grad=True)
    want = naive(module, options, given.q, given.k, given.v, grid)
    assert_same_gradients(given(module, grid), want, [*given.tensors, *module.parameters()], 1e-10)


@both_precisions
@of_case("t5_core", "t5_v0_core", "t5_dit_core")
def test_equals_reference(golden: Golden, dtype: torch.dtype) -> None:
    official, given = golden.constructor, golden.inputs(dtype)
    sizes = golden.kwargs
    grid = Grid((sizes["H"], sizes["W"]) if sizes else (1, given[0].shape[2]))
    options = VARIANTS[golden.meta["case"].removesuffix("_core")]
    module = T5Attention(official["dim"], official["num_heads"], grid, **options).to(dtype)
    module.load_state_dict(golden.parameters())
    golden.check_call(module(*given, grid), given)
    golden.check_parameters(module, lambda name: name)


@both_precisions
@of_case(*VARIANTS)
def test_equals_reference_with_projections(golden: Golden, dtype: torch.dtype) -> None:
    official, (x,) = golden.constructor, golden.inputs(dtype)
    sizes = golden.kwargs
    grid = Grid((sizes["H"], sizes["W"]) if sizes else (1, x.shape[1]))
    spec = {"name": "t5", **VARIANTS[golden.meta["case"]]}
    layer = AttentionLayer(official["dim"], official["num_heads"], grid, attention=spec).to(dtype)

    def our_name(name: str) -> str:
        return name if name.startswith(("qkv", "proj")) else f"mechanism.{name}"

    layer.load_state_dict({our_name(name): tensor for name, tensor in golden.parameters().items()})
    golden.check_call(layer(x, grid), [x])
    golden.check_parameters(layer, our_name)


def test_analysis_says_why_there_is_no_matrix_and_how_large_the_state_is() -> None:
    model = linvit.create_backbone("deit_nano", attention="t5")
    with Recorder(model) as recorder:
        model(torch.randn(1, 3, 32, 32))
    call = recorder.calls["blocks.0.attn"]
    with pytest.raises(UserError, match="T5Attention has no matrix over tokens, and no rank: one step of training"):
        attention_matrix(call.mechanism, call.q, call.k, call.grid, v=call.v)
    assert call.state() == 4 * 3 * 3 * 32 * 32  # three matrices of each of three heads


def test_bias_of_the_keys_has_no_effect() -> None:
    grid = Grid((3, 4))
    module = mechanism("t5", grid)
    q, k, v, _ = inputs(module, grid)
    torch.testing.assert_close(module(q, k + randn(1, 3, 1, 8), v, grid), module(q, k, v, grid))
