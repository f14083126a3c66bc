"""AFT-simple equals its formula, one query and one key at a time, and has the properties that the formula promises."""

import pytest
import torch
from torch import Tensor

from linvit import AttentionLayer, Grid
from linvit.attention.aft_simple import AFTSimpleAttention
from tests.helpers import assert_same_gradients, inputs, mechanism, options_then_grids, perturb, randn

GRID = Grid((3, 5), kv_size=(2, 3), num_prefix=1)
ACTS = ["sigmoid", "tanh", "relu", "identity"]
acts = pytest.mark.parametrize("query_act", ACTS)


# The formula


def gate(query_act: str, q: Tensor) -> Tensor:
    """The query's activation, written out."""
    if query_act == "sigmoid":
        return 1 / (1 + torch.exp(-q))
    if query_act == "tanh":
        return (torch.exp(q) - torch.exp(-q)) / (torch.exp(q) + torch.exp(-q))
    return torch.where(q > 0, q, 0) if query_act == "relu" else q


def naive(query_act: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`act(q_n) * sum_t exp(k_t) v_t / sum_t exp(k_t)`, channel by channel, on any layout (..., N, channels)."""
    total = torch.zeros_like(v[..., 0, :])
    weight = torch.zeros_like(total)
    for t in range(k.shape[-2]):
        total = total + torch.exp(k[..., t, :]) * v[..., t, :]
        weight = weight + torch.exp(k[..., t, :])
    return torch.stack([gate(query_act, q[..., n, :]) * total / weight for n in range(q.shape[-2])], dim=-2)


@pytest.mark.parametrize(
    ("query_act", "grid"),
    options_then_grids(ACTS, [GRID, Grid((7, 9)), Grid((1, 50)), Grid((50, 1)), Grid((13, 31))]),
    ids=str,
)
def test_equals_formula(query_act: str, grid: Grid) -> None:
    module = mechanism({"name": "aft_simple", "query_act": query_act}, grid)
    given = inputs(module, grid, grad=True)
    want = naive(query_act, given.q, given.k, given.v)
    assert_same_gradients(given(module, grid), want, given.tensors, 1e-10)


def test_gate_is_the_sigmoid_by_default_and_nothing_is_learnt() -> None:
    module = AFTSimpleAttention(24, 3, GRID)
    assert module.query_act == "sigmoid"
    assert not list(module.parameters())


@acts
def test_gradients_are_those_of_finite_differences(query_act: str) -> None:
    grid = Grid((2, 2), kv_size=(1, 3))
    module = mechanism({"name": "aft_simple", "query_act": query_act}, grid, dim=4, num_heads=2)
    given = inputs(module, grid, batch=1)
    q, k, v, _ = given.map(lambda x: (x + 0.2 * x.sign()).requires_grad_())  # relu has no derivative at 0
    assert torch.autograd.gradcheck(lambda q, k, v: module(q, k, v, grid), (q, k, v))


@pytest.mark.parametrize("sr_ratio", [1, 2])
def test_layer_equals_formula_end_to_end(sr_ratio: int) -> None:
    grid = Grid((4, 6), num_prefix=1)
    layer = perturb(AttentionLayer(24, 3, grid, attention="aft_simple", sr_ratio=sr_ratio).double())
    x = randn(2, grid.num_queries, 24, grad=True)
    if sr_ratio == 1:
        q, k, v = (x @ layer.qkv.weight.T + layer.qkv.bias).split(24, dim=2)
    else:
        q = x @ layer.q.weight.T + layer.q.bias
        k, v = (layer.sr(x, grid) @ layer.kv.weight.T + layer.kv.bias).split(24, dim=2)
        assert k.shape[1] == 1 + 6
    want = naive("sigmoid", q, k, v) @ layer.proj.weight.T + layer.proj.bias
    assert_same_gradients(layer(x, grid), want, [x, *layer.parameters()], 1e-10)


# Properties


@acts
def test_half_precision_at_many_tokens(query_act: str) -> None:
    """The weights of 3136 keys are below float16's resolution; only the result is rounded, at worst to nothing."""
    grid, dtype, scale = Grid((56, 56)), torch.float16, 16.0
    module = mechanism({"name": "aft_simple", "query_act": query_act}, grid, dim=8, num_heads=2, dtype=dtype)
    given = inputs(module, grid, batch=1, dtype=dtype, scale=scale, grad=True)
    out = given(module, grid)
    out.float().mean().backward()
    assert all(x.isfinite().all() for x in [out, *(x.grad for x in given.tensors)])
    want = naive(query_act, *(x.detach().double() for x in (given.q, given.k, given.v)))
    limits = torch.finfo(dtype)
    assert ((out.double() - want).abs() <= 2 * limits.eps * want.abs().max() + limits.eps * limits.tiny).all()
