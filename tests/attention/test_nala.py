"""NaLaFormer's attention equals its authors' code, and, option by option, the formula written out naively."""

import pytest
import torch
from torch import Tensor

from linvit import Grid
from linvit.attention.nala import NaLaAttention
from tests.attention.rotary_formula import GRIDS, check_core, check_layer, lepe, rotated
from tests.golden_files import Golden, both_precisions, of_case
from tests.helpers import assert_near, assert_same_gradients, inputs, mechanism, options_then_grids


def naive(module: NaLaAttention, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
    """`sum_m rot(Q_n).rot(K_m) v_m / (sum_m Q_n.K_m + M eps) + lepe(v)`."""
    width, norm = q.shape[-1], q.square().sum(-1, keepdim=True).sqrt()
    power = module.power * (0.5 + norm.tanh())
    q = torch.cat([(q.clamp(min=0) / norm) ** power, ((-q).clamp(min=0) / norm) ** power], dim=-1)
    k = torch.cat([k.clamp(min=0), (-k).clamp(min=0)], dim=-1) ** module.key_power
    sums = torch.einsum("bhnd,bhmd->bhn", q, k) + k.shape[2] * module.eps
    if module.facts.rotary:
        q, k = rotated(q, grid, grid.size, width), rotated(k, grid, grid.keys_size, width)
    return torch.einsum("bhnd,bhmd->bhnm", q, k) / sums[..., None] @ v + lepe(module, v, grid)


OPTIONS = [{}, {"rotary": False}, {"lepe_kernel": 0}, {"power": 2, "key_power": 1.5}, {"lepe_kernel": 3, "eps": 0.5}]


@pytest.mark.parametrize(("options", "grid"), options_then_grids(OPTIONS, GRIDS), ids=str)
def test_equals_formula(options: dict[str, object], grid: Grid) -> None:
    module = mechanism({"name": "nala", **options}, grid)
    given = inputs(module, grid, grad=True)
    want = naive(module, given.q, given.k, given.v, grid)
    assert_same_gradients(given(module, grid), want, [*given.tensors, *module.parameters()], 1e-10)


def test_equals_formula_with_narrow_keys() -> None:
    grid = Grid((3, 4))
    module = mechanism("nala", grid, key_dim=4)
    given = inputs(module, grid)
    assert_near(given(module, grid), naive(module, given.q, given.k, given.v, grid), 1e-12)


@both_precisions
@of_case("nala_core")
def test_equals_reference(golden: Golden, dtype: torch.dtype) -> None:
    check_core(golden, NaLaAttention, dtype)


@both_precisions
@of_case("nala")
def test_equals_reference_with_projections_and_gate(golden: Golden, dtype: torch.dtype) -> None:
    check_layer(golden, "nala", dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_query_of_zero_gives_zero_and_finite_gradients(dtype: torch.dtype) -> None:
    """The reference divides by its norm."""
    grid = Grid((3, 4))
    module = mechanism({"name": "nala", "lepe_kernel": 0}, grid, dtype=dtype)
    given = inputs(module, grid, dtype=dtype)
    given.q[:, :, 1] = 0
    given = given.map(lambda x: x.requires_grad_())
    out = given(module, grid)
    assert (out[:, :, 1] == 0).all()
    assert out.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(out.sum(), given.tensors))
