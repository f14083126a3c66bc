"""PolaFormer++'s attention equals its authors' code, and, option by option, the formula written out naively."""

import copy

import pytest
import torch
from torch import Tensor

from linvit import Grid, UserError
from linvit.attention.pola_pp import PolaPPAttention
from tests.attention.rotary_formula import GRIDS, check_core, check_layer, lepe, rotated
from tests.golden_files import Golden, both_precisions, of_case
from tests.helpers import assert_near, assert_same_gradients, inputs, mechanism, options_then_grids


def naive(module: PolaPPAttention, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
    """`sum_m rot(Q_in).rot(K_m) v_im / (sum_m Q_in.K_m + M eps) + lepe(v)` for the halves v_i of the values."""
    plus, minus = q.clamp(min=0), (-q).clamp(min=0)
    key = torch.cat([k.clamp(min=0), (-k).clamp(min=0)], -1).exp() - 1
    halves = []
    for pair, s, half in zip(
        ([plus, minus], [minus, plus]), (module.s1, module.s2), v.tensor_split(2, -1), strict=True
    ):
        query = (torch.cat(pair, -1) * torch.sigmoid(s)).exp() - 1
        sums = torch.einsum("bhnd,bhmd->bhn", query, key) + k.shape[2] * module.eps
        turned = key
        if module.facts.rotary:
            query, turned = rotated(query, grid, grid.size), rotated(key, grid, grid.keys_size)
        halves.append(torch.einsum("bhnd,bhmd->bhnm", query, turned) / sums[..., None] @ half)
    return torch.cat(halves, -1) + lepe(module, v, grid)


OPTIONS = [{}, {"rotary": False}, {"lepe_kernel": 0}, {"lepe_kernel": 3, "eps": 0.5}]


@pytest.mark.parametrize(("options", "grid"), options_then_grids(OPTIONS, GRIDS), ids=str)
def test_equals_formula(options: dict[str, object], grid: Grid) -> None:
    module = mechanism({"name": "pola_pp", **options}, grid)
    given = inputs(module, grid, grad=True)
    want = naive(module, given.q, given.k, given.v, grid)
    assert_same_gradients(given(module, grid), want, [*given.tensors, *module.parameters()], 1e-10)


@pytest.mark.parametrize(("rotary", "scale"), [(True, 1e-3), (True, 3.0), (False, 60.0)])
def test_small_and_large_entries_in_float32(rotary: bool, scale: float) -> None:
    """Up to entries of 200, whose exponentials float32 does not have and the formula in float64 has."""
    grid = Grid((3, 4))
    module = mechanism({"name": "pola_pp", "rotary": rotary, "lepe_kernel": 0}, grid, dtype=torch.float32)
    given = inputs(module, grid, dtype=torch.float32, scale=scale)
    given.q[:, :, 1] = 0
    wide = given.map(Tensor.double)
    want = naive(copy.deepcopy(module).double(), wide.q, wide.k, wide.v, grid)
    assert want.isfinite().all()
    assert_near(given(module, grid), want, 1e-4)


def test_odd_heads_do_not_turn_and_have_a_larger_first_half() -> None:
    grid = Grid((2, 3))
    with pytest.raises(UserError, match=r"need a multiple of 2 channels per head; dim 15 with num_heads 3 has 5\."):
        mechanism("pola_pp", grid, dim=15, num_heads=3)
    module = mechanism({"name": "pola_pp", "rotary": False}, grid, dim=15, num_heads=3)
    given = inputs(module, grid)
    assert_near(given(module, grid), naive(module, given.q, given.k, given.v, grid), 1e-12)


@both_precisions
@of_case("pola_pp_core")
def test_equals_reference(golden: Golden, dtype: torch.dtype) -> None:
    check_core(golden, PolaPPAttention, dtype)


@both_precisions
@of_case("pola_pp")
def test_equals_reference_with_projections_and_gate(golden: Golden, dtype: torch.dtype) -> None:
    check_layer(golden, "pola_pp", dtype)
