"""Flow attention equals its formula, one token at a time, and Flowformer's code."""

import pytest
import torch
from torch import Tensor

from linvit import AttentionLayer, Grid
from linvit.attention.flow import FlowAttention
from tests.golden_files import Golden, both_precisions, of_case
from tests.helpers import assert_near, assert_same_gradients, inputs, mechanism, options_then_grids

GRID = Grid((3, 5), kv_size=(2, 3), num_prefix=1)
OPTIONS = [{}, {"eps_out": 0.0}, {"eps": 0.1, "eps_out": 0.2}, {"feature_map": "elu"}]


def naive(module: FlowAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The formula for one head, query by query and key by key: q (N, dk), k (M, dk), v (M, d)."""
    phi = torch.sigmoid if module.feature_map == "sigmoid" else lambda x: torch.where(x > 0, x + 1, x.exp())
    q, k, e, out = phi(q), phi(k), module.eps, module.eps_out
    incoming = torch.stack([1 / ((x + e).dot(k.sum(0) + e) + out) for x in q])
    outgoing = torch.stack([1 / ((y + e).dot(q.sum(0) + e) + out) for y in k])
    gets = sum(o * y for o, y in zip(outgoing, k, strict=True))
    gives = sum(i * x for i, x in zip(incoming, q, strict=True))
    gate = torch.stack([((x + e).dot(gets + e) + out) * len(q) / len(k) for x in q]).sigmoid()
    competition = torch.stack([((y + e).dot(gives + e) + out).clamp(-1, 1) for y in k]).exp()
    weights = len(k) * competition / competition.sum()
    rows = [
        gate[n] * incoming[n] * sum(weights[m] * q[n].dot(k[m]) * v[m] for m in range(len(k))) for n in range(len(q))
    ]
    return torch.stack(rows)


@pytest.mark.parametrize(("options", "grid"), options_then_grids(OPTIONS, [GRID, Grid((3, 4)), Grid((1, 1))]), ids=str)
def test_equals_formula(options: dict[str, object], grid: Grid) -> None:
    module = mechanism({"name": "flow", **options}, grid)
    given = inputs(module, grid, grad=True)
    heads = [naive(module, *(x[b, h] for x in given[:3])) for b in range(2) for h in range(3)]
    want = torch.stack(heads).unflatten(0, (2, 3))
    assert_same_gradients(given(module, grid), want, given.tensors, 1e-10)


@both_precisions
@of_case("flow_core", "flow_cv_core")
def test_equals_flowformer(golden: Golden, dtype: torch.dtype) -> None:
    """The code for images adds eps to the four products, too; the other code does not."""
    q, k, v = given = golden.inputs(dtype)
    grid = Grid((1, q.shape[2]), kv_size=(1, k.shape[2]))
    eps_out = 1e-6 if golden.meta["case"] == "flow_cv_core" else 0.0
    golden.check_call(FlowAttention(q.shape[1] * q.shape[3], q.shape[1], grid, eps_out=eps_out)(q, k, v, grid), given)


@both_precisions
@of_case("flow_cv")
def test_layer_equals_flowformers(golden: Golden, dtype: torch.dtype) -> None:
    (x,) = given = golden.inputs(dtype)
    grid = Grid((5, 7))
    layer = AttentionLayer(*golden.constructor.values(), grid, attention="flow").to(dtype)
    layer.load_state_dict(golden.parameters())
    golden.check_call(layer(x, grid), given)
    golden.check_parameters(layer, str)


def test_keys_do_not_compete_where_they_are_fewer_than_the_queries() -> None:
    """Their mean flow is N / M, which is clamped to 1 for all of them: the softmax over them is uniform."""
    module = mechanism("flow", GRID)
    q, k, v, _ = inputs(module, GRID)
    left, right = module.factors(q, k, GRID)
    assert_near(right, k.sigmoid(), 1e-12)
    assert_near(module(q, k, v, GRID), left @ (k.sigmoid().mT @ v), 1e-12)
