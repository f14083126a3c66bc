"""Efficient additive attention equals its formula, one token at a time, and SwiftFormer's code."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from linvit import AttentionLayer, Grid, UserError
from linvit.analysis import attention_matrix
from linvit.attention.additive import AdditiveAttention
from tests.golden_files import Golden, both_precisions, of_case
from tests.helpers import assert_near, assert_same_gradients, inputs, mechanism

GRID = Grid((3, 4), num_prefix=1)


def joined(x: Tensor) -> Tensor:
    """(B, h, N, d) -> (B, N, C)."""
    return x.transpose(1, 2).flatten(2)


def naive(module: AdditiveAttention, q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The output (N, C) for tokens (N, C) of one image, and how the values of length 1 are mixed, (C, N, N)."""
    q, v = (torch.stack([x / x.square().sum().sqrt() for x in tokens]) for tokens in (q, v))
    scores = torch.stack([x.dot(module.w_g[:, 0]) / q.shape[1] ** 0.5 for x in v])
    weights = scores / scores.square().sum().sqrt()
    total = sum(weight * value for weight, value in zip(weights, v, strict=True))
    rows = [module.proj.weight @ (total * q[n]) + module.proj.bias + v[n] for n in range(len(q))]
    return torch.stack(rows), q.T[:, :, None] * weights


@pytest.mark.parametrize("grid", [GRID, Grid((5, 2))], ids=str)
def test_equals_formula(grid: Grid) -> None:
    module = mechanism("additive", grid)
    given = inputs(module, grid, grad=True)
    found = [naive(module, joined(given.q)[b], joined(given.v)[b]) for b in range(2)]
    want = torch.stack([out for out, _ in found])
    sources = [given.q, given.v, *module.parameters()]
    assert_same_gradients(joined(given(module, grid)), want, sources, 1e-10)
    matrix = attention_matrix(module, given.q, given.k, grid, v=given.v)
    assert_near(matrix, torch.stack([mixed for _, mixed in found]).unflatten(1, (3, 8)), 1e-12)


@both_precisions
@of_case("additive_core")
def test_equals_swiftformer(golden: Golden, dtype: torch.dtype) -> None:
    query, key = given = golden.inputs(dtype)
    grid = Grid((6, 6))
    module = AdditiveAttention(16, 1, grid).to(dtype)
    module.load_state_dict({name.lower(): tensor for name, tensor in golden.parameters().items()})
    q, v = key.unsqueeze(1), query.unsqueeze(1)  # (B, 1, N, C)
    golden.check_call(module(q, q, v, grid).squeeze(1), given)
    golden.check_parameters(module, str.lower)


@both_precisions
@of_case("additive")
def test_layer_equals_swiftformers(golden: Golden, dtype: torch.dtype) -> None:
    """The mechanism has all `token_dim * num_heads` channels, whatever our number of heads is."""
    (x,) = given = golden.inputs(dtype)
    p = {name: t.to(dtype, copy=True).requires_grad_() for name, t in golden.parameters().items()}
    grid, heads = Grid((1, x.shape[1])), 4
    module = AdditiveAttention(16, heads, grid)
    own = {"w_g": p["w_g"], "proj.weight": p["Proj.weight"], "proj.bias": p["Proj.bias"]}
    q, v = (
        F.linear(x, p[f"{name}.weight"], p[f"{name}.bias"]).unflatten(2, (heads, -1)).transpose(1, 2)
        for name in ("to_key", "to_query")
    )
    out = joined(torch.func.functional_call(module, own, (q, q, v, grid), strict=True))
    golden.check_call(F.linear(out, p["final.weight"], p["final.bias"]), given)
    for name in golden.named("grad_param."):
        golden.check(name, p[name.removeprefix("grad_param.")].grad)


def test_layer_projects_keys_then_queries_and_back() -> None:
    grid = Grid((3, 5))
    layer = AttentionLayer(24, 3, grid, attention="additive").double()
    x = inputs(layer.mechanism, grid).v.transpose(1, 2).flatten(2)
    key, query = layer.qkv(x).split(24, dim=2)
    want = torch.stack([naive(layer.mechanism, key[b], query[b])[0] for b in range(2)])
    assert_near(layer(x, grid), layer.proj(want), 1e-12)


def test_the_matrix_needs_the_values() -> None:
    module = mechanism("additive", GRID)
    given = inputs(module, GRID)
    with pytest.raises(UserError, match="depends on the values; pass v="):
        attention_matrix(module, given.q, given.k, GRID)
