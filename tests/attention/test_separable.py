"""Separable attention equals its formula, one token at a time, and MobileViTv2's code."""

import pytest
import torch
from torch import Tensor

from linvit import Grid, UserError
from linvit.attention.separable import SeparableAttention
from linvit.layers.windows import WindowAttention
from tests.golden_files import Golden, both_precisions, of_case
from tests.helpers import assert_same_gradients, inputs, mechanism

GRID = Grid((3, 4), num_prefix=1)


def naive(module: SeparableAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`relu(k_n) sum_m exp(w . x_m) v_m / sum_m exp(w . x_m)` for tokens (N, C) of one image; q is the input x."""
    weights = torch.stack([module.scores.weight[0].dot(x).exp() for x in q])
    total = sum(weight * value for weight, value in zip(weights, v, strict=True)) / weights.sum()
    return torch.stack([torch.where(gate > 0, gate, 0) * total for gate in k])


@pytest.mark.parametrize("grid", [GRID, Grid((5, 2))], ids=str)
def test_equals_formula(grid: Grid) -> None:
    module = mechanism("separable", grid)
    given = inputs(module, grid, grad=True)
    joined = [x.transpose(1, 2).flatten(2) for x in given[:3]]  # (B, N, C)
    want = torch.stack([naive(module, *(x[b] for x in joined)) for b in range(2)])
    got = given(module, grid).transpose(1, 2).flatten(2)
    assert_same_gradients(got, want, [*given.tensors, *module.parameters()], 1e-10)


def tokens(plane: Tensor) -> Tensor:
    """Every phase of the pixels a sample of its own: (B, C, P, N) -> (B P, 1, N, C), one head."""
    return plane.permute(0, 2, 3, 1).flatten(0, 1).unsqueeze(1)


@both_precisions
@of_case("separable_core")
def test_equals_mobilevitv2(golden: Golden, dtype: torch.dtype) -> None:
    """The scores are given there: here they are the first channel of an input, which the layer picks out."""
    scores, key, value = given = golden.inputs(dtype)
    module = SeparableAttention(12, 1, Grid((5, 6))).to(dtype)
    module.scores.weight.data = torch.eye(1, 12, dtype=dtype)
    x = torch.cat([scores, torch.zeros_like(key[:, 1:])], dim=1)
    out = module(tokens(x), tokens(value), tokens(key), Grid((5, 6)))  # (B P, 1, N, C)
    golden.check_call(out.unflatten(0, (2, 4)).squeeze(2).permute(0, 3, 1, 2), given)


def projections(golden: Golden, dtype: torch.dtype) -> dict[str, Tensor]:
    """The official projection `[scores 1 | key C | value C]` as our parameters, ready for gradients."""
    p = {name.replace("block.conv.", ""): t.to(dtype).squeeze() for name, t in golden.parameters().items()}
    return {name: t.clone().requires_grad_() for name, t in p.items()}


def on_map(phases: Tensor) -> Tensor:
    """(B, C, 4, 28) -> tokens (B, 8 * 14, C): the pixels of 2 x 2 in each of 4 x 7 patches."""
    return phases.unflatten(3, (4, 7)).unflatten(2, (2, 2)).permute(0, 4, 2, 5, 3, 1).flatten(1, 4)


@both_precisions
@of_case("separable")
def test_layer_equals_mobilevitv2s(golden: Golden, dtype: torch.dtype) -> None:
    """A window host with `dilation` makes of a map what the official code unfolds."""
    (x,) = given = golden.inputs(dtype)
    p, grid = projections(golden, dtype), Grid((8, 14))
    layer = WindowAttention(12, 1, grid, window=None, dilation=2, attention="separable").to(dtype)
    own = {"mechanism.scores.weight": p["qkv_proj.weight"][:1]}
    for kind in ("weight", "bias"):
        own[f"qkv.{kind}"] = p[f"qkv_proj.{kind}"][1:].roll(12, 0)  # [value | key]
        own[f"proj.{kind}"] = p[f"out_proj.{kind}"]
    out = torch.func.functional_call(layer, own, (on_map(x), grid), strict=True)  # (B, 8 * 14, C)
    phases = out.unflatten(1, (4, 2, 7, 2)).permute(0, 5, 2, 4, 1, 3)  # (B, C, 2, 2, 4, 7)
    golden.check_call(phases.flatten(4).flatten(2, 3), given)
    check_parameters(golden, p)


@both_precisions
@of_case("separable_cross")
def test_scores_and_keys_of_other_tokens_equal_mobilevitv2s(golden: Golden, dtype: torch.dtype) -> None:
    """10 tokens gate what is mixed of 27 others. No host of ours does that, so it goes past the check of numbers."""
    x, other = given = golden.inputs(dtype)
    p = projections(golden, dtype)

    def linear(plane: Tensor, name: str, rows: slice) -> Tensor:
        return tokens(plane) @ p[f"{name}.weight"][rows].T + p[f"{name}.bias"][rows]

    module = SeparableAttention(12, 1, Grid((1, 27)))
    del module.scores.weight
    module.scores.weight = p["qkv_proj.weight"][:1]
    k, v = linear(x, "qkv_proj", slice(13, 25)), linear(other, "qkv_proj", slice(1, 13))
    out = module.forward(tokens(other), k, v, Grid((1, 27))).squeeze(1) @ p["out_proj.weight"].T + p["out_proj.bias"]
    golden.check_call(out.unflatten(0, (2, 4)).permute(0, 3, 1, 2), given)
    check_parameters(golden, p)


def check_parameters(golden: Golden, p: dict[str, Tensor]) -> None:
    for name in golden.named("grad_param."):
        ours = p[name.removeprefix("grad_param.").replace("block.conv.", "")].grad
        golden.check(name, ours.view_as(golden.tensors[name]))  # that of the scores' bias is 0


def test_fewer_keys_are_refused() -> None:
    module, reduced = mechanism("separable", GRID), Grid((4, 4), (2, 2))
    with pytest.raises(UserError, match=r"needs as many keys as queries .* got a grid of 4x4 queries and 2x2 keys"):
        inputs(module, reduced)(module, reduced)
