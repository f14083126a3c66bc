"""MALA equals its authors' code, and, option by option, the formula written out naively."""

import pytest
import torch
from torch import Tensor

from linvit import Grid
from linvit.attention.mala import MALAAttention
from tests.attention.rotary_formula import GRIDS, check_core, check_layer, lepe, positive, rotated
from tests.golden_files import Golden, both_precisions, of_case
from tests.helpers import assert_near, assert_same_gradients, inputs, mechanism, options_then_grids


def naive(module: MALAAttention, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
    """`sum_m ((1 + 1/(z_n + eps)) s rot(q_n).rot(k_m) - z_n) v_m / M + lepe(v)`, `z_n = s mean_m(q_n.k_m)`."""
    q, k = positive(q), positive(k)
    scale = q.shape[-1] ** -0.5
    z = scale * torch.einsum("bhnd,bhmd->bhnm", q, k).mean(-1, keepdim=True)
    if module.facts.rotary:
        q, k = rotated(q, grid, grid.size), rotated(k, grid, grid.keys_size)
    weights = scale * torch.einsum("bhnd,bhmd->bhnm", q, k)
    matrix = ((1 + 1 / (z + module.eps)) * weights - z) / k.shape[2]
    return matrix @ v + lepe(module, v, grid)


OPTIONS = [{}, {"rotary": False}, {"lepe_kernel": 0}, {"lepe_kernel": 3, "eps": 0.5}]


@pytest.mark.parametrize(("options", "grid"), options_then_grids(OPTIONS, GRIDS), ids=str)
def test_equals_formula(options: dict[str, object], grid: Grid) -> None:
    module = mechanism({"name": "mala", **options}, grid)
    given = inputs(module, grid, grad=True)
    want = naive(module, given.q, given.k, given.v, grid)
    assert_same_gradients(given(module, grid), want, [*given.tensors, *module.parameters()], 1e-10)


def test_equals_formula_with_narrow_keys() -> None:
    grid = Grid((3, 4))
    module = mechanism("mala", grid, key_dim=4)
    given = inputs(module, grid)
    assert_near(given(module, grid), naive(module, given.q, given.k, given.v, grid), 1e-12)


@both_precisions
@of_case("mala_core")
def test_equals_reference(golden: Golden, dtype: torch.dtype) -> None:
    check_core(golden, MALAAttention, dtype)


@both_precisions
@of_case("mala")
def test_equals_reference_with_projections_and_gate(golden: Golden, dtype: torch.dtype) -> None:
    check_layer(golden, "mala", dtype)
