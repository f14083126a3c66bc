"""CosFormer equals its authors' code and its formula, pair of tokens by pair of tokens."""

import math

import pytest
import torch

from linvit import Grid
from linvit.attention.cosformer import CosFormerAttention
from tests.golden_files import Golden, both_precisions, of_case
from tests.helpers import assert_same_gradients, inputs, mechanism


@pytest.mark.parametrize("grid", [Grid((3, 4), num_prefix=1), Grid((4, 6), (2, 3), num_prefix=1)], ids=str)
@pytest.mark.parametrize("eps", [1e-6, 2.0])
def test_equals_formula(grid: Grid, eps: float) -> None:
    module = mechanism({"name": "cosformer", "eps": eps}, grid)
    given = inputs(module, grid, grad=True)
    places = [torch.arange(x.shape[2], dtype=torch.float64) for x in (given.q, given.k)]
    distance = (places[0][:, None] - places[1]) / max(grid.num_queries, grid.num_keys)
    weights = given.q.clamp_min(0) @ given.k.clamp_min(0).mT * torch.cos(math.pi / 2 * distance)
    want = weights @ given.v / weights.sum(-1, keepdim=True).clamp_min(eps)
    assert_same_gradients(given(module, grid), want, given.tensors, 1e-9)


@both_precisions
@of_case("cosformer_core")
def test_equals_reference(golden: Golden, dtype: torch.dtype) -> None:
    q, k, v = given = golden.inputs(dtype)
    grid = Grid((1, q.shape[2]), (1, k.shape[2]))
    module = CosFormerAttention(golden.constructor["embed_dim"], golden.constructor["num_heads"], grid)
    golden.check_call(module(q, k, v, grid), given)
