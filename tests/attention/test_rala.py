"""RALA equals its authors' code, and, option by option, the formula written out naively."""

import pytest
import torch
from torch import Tensor

from linvit import Grid
from linvit.attention.rala import RALAAttention
from tests.attention.rotary_formula import GRIDS, check_core, check_layer, lepe, positive, rotated
from tests.golden_files import Golden, both_precisions, of_case
from tests.helpers import assert_near, assert_same_gradients, inputs, mechanism, options_then_grids


def naive(module: RALAAttention, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
    """`sum_m rot(q_n).rot(k_m) v_m / (sum_m q_n.k_m + M eps) + lepe(v)` with keys weighted by the mean query."""
    q, k = positive(q), positive(k)
    if module.key_weights:
        logits = torch.einsum("bhd,bhmd->bhm", q.mean(2), k) / q.shape[-1] ** 0.5
        k = k * (torch.softmax(logits, -1) * k.shape[2])[..., None]
    sums = torch.einsum("bhnd,bhmd->bhn", q, k) / k.shape[2] + module.eps
    if module.facts.rotary:
        q, k = rotated(q, grid, grid.size), rotated(k, grid, grid.keys_size)
    weights = torch.einsum("bhnd,bhmd->bhnm", q, k) / k.shape[2] / sums[..., None]
    return weights @ v + lepe(module, v, grid)


OPTIONS = [{}, {"rotary": False}, {"key_weights": False}, {"lepe_kernel": 0}, {"lepe_kernel": 3, "eps": 0.5}]


@pytest.mark.parametrize(("options", "grid"), options_then_grids(OPTIONS, GRIDS), ids=str)
def test_equals_formula(options: dict[str, object], grid: Grid) -> None:
    module = mechanism({"name": "rala", **options}, grid)
    given = inputs(module, grid, grad=True)
    want = naive(module, given.q, given.k, given.v, grid)
    assert_same_gradients(given(module, grid), want, [*given.tensors, *module.parameters()], 1e-10)


def test_equals_formula_with_narrow_keys() -> None:
    grid = Grid((3, 4))
    module = mechanism("rala", grid, key_dim=4)
    given = inputs(module, grid)
    assert_near(given(module, grid), naive(module, given.q, given.k, given.v, grid), 1e-12)


@both_precisions
@of_case("rala_core")
def test_equals_reference(golden: Golden, dtype: torch.dtype) -> None:
    check_core(golden, RALAAttention, dtype)


@both_precisions
@of_case("rala")
def test_equals_reference_with_projections_and_gate(golden: Golden, dtype: torch.dtype) -> None:
    check_layer(golden, "rala", dtype)
