"""AFT-simple equals its formula, one query and one key at a time, and has the properties that the formula promises."""

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import strategies as st
from torch import Tensor

from linvit import AttentionLayer, Grid
from linvit.analysis import attention_matrix
from linvit.attention.aft_simple import AFTSimpleAttention
from tests.attention.test_hydra import merge, split
from tests.helpers import assert_near, assert_same_gradients, inputs, mechanism, options_then_grids, perturb, randn

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
def test_it_is_hydra_with_other_kernels(query_act: str) -> None:
    module = mechanism({"name": "aft_simple", "query_act": query_act}, GRID)
    hydra = mechanism({"name": "hydra", "kernel_q": query_act, "kernel_k": "softmax_tokens"}, GRID)
    given = inputs(module, GRID)
    assert_near(given(module, GRID), given(hydra, GRID), 1e-13)


def test_number_of_heads_does_not_matter() -> None:
    queries, keys, values = (randn(2, n, 24, seed=i) for i, n in enumerate((16, 7, 7)))
    one = mechanism("aft_simple", GRID, num_heads=1)(queries[:, None], keys[:, None], values[:, None], GRID)
    for heads in (3, 24):
        module = mechanism("aft_simple", GRID, num_heads=heads)
        out = module(split(queries, heads), split(keys, heads), split(values, heads), GRID)
        assert_near(merge(out), one[:, 0], 1e-13)


@acts
def test_every_channel_is_an_outer_product_whose_rows_sum_to_the_gate(query_act: str) -> None:
    module = mechanism({"name": "aft_simple", "query_act": query_act}, GRID)
    given = inputs(module, GRID)
    matrix = attention_matrix(module, given.q, given.k, GRID)
    assert matrix.shape == (2, 3, 8, 16, 7)
    opening = gate(query_act, given.q).mT  # (B, h, d, N)
    assert_near(matrix.sum(-1), opening, 1e-12)
    weights = torch.exp(given.k) / torch.exp(given.k).sum(2, keepdim=True)
    assert_near(matrix, opening[..., :, None] * weights.mT[..., None, :], 1e-12)
    left, right = module.factors(given.q, given.k, GRID)
    assert_near(left, opening.unsqueeze(-1), 1e-12)
    assert_near(right, weights.mT.unsqueeze(-1), 1e-12)


@drawn(st.integers(0, 2**31), st.floats(-1e3, 1e3))
def test_constant_added_to_the_keys_cancels(seed: int, shift: float) -> None:
    """Another in every channel; also where exp alone would overflow."""
    module = mechanism("aft_simple", GRID)
    q, k, v, _ = given = inputs(module, GRID, seed=seed)
    shifts = shift * randn(3, 1, 8, seed=seed)
    assert_near(module(q, k + shifts, v, GRID), given(module, GRID), 1e-9)


@drawn(st.integers(0, 2**31), st.floats(0.1, 30.0))
def test_output_lies_between_zero_and_the_values(seed: int, scale: float) -> None:
    """A weighted mean of positive values, times a gate between zero and one."""
    module = mechanism("aft_simple", GRID)
    q, k, v, _ = inputs(module, GRID, seed=seed, scale=scale)
    v = v.abs()
    out = module(q, k, v, GRID)
    opening = gate("sigmoid", q)
    assert (out >= opening * v.amin(2, keepdim=True) * (1 - 1e-12)).all()
    assert (out <= opening * v.amax(2, keepdim=True) * (1 + 1e-12)).all()


def test_twice_the_same_keys_change_nothing() -> None:
    module = mechanism("aft_simple", GRID)
    q, k, v, _ = given = inputs(module, GRID)
    doubled = module(q, k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1), GRID._replace(kv_size=(1, 13)))
    assert_near(doubled, given(module, GRID), 1e-13)


def test_zero_keys_give_the_mean_and_zero_queries_half_of_it() -> None:
    module = mechanism("aft_simple", GRID)
    q, k, v, _ = inputs(module, GRID)
    zero_q, zero_k = (torch.zeros_like(x).requires_grad_() for x in (q, k))
    out = module(zero_q, zero_k, v, GRID)
    assert_near(out, v.mean(2, keepdim=True).expand_as(out) / 2, 1e-13)
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), [zero_q, zero_k]))


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
