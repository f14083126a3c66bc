"""SOFT and SOFT++ equal their reference codes and, option by option, the formulas written out naively."""

from typing import Any

import pytest
import torch
from torch import Tensor

import linvit
from linvit import Grid, UserError
from linvit.attention.soft import SoftAttention
from linvit.attention.soft_norm import SoftNormAttention
from tests.attention.soft_formula import (
    GRIDS,
    check_kernel,
    check_layer,
    kernel_options,
    naive_inverse,
    naive_local,
    naive_parts,
)
from tests.golden_files import Golden, both_precisions, of_case
from tests.helpers import assert_formula, assert_near, formulas, inputs, mechanism, relative_error

SPECS: dict[str, dict[str, Any]] = {  # as the references compute: SOFT++ has one alpha for the batch
    "soft": {"name": "soft"},
    "softpp": {"name": "soft_norm", "alpha_scope": "batch"},
}


@both_precisions
@of_case("soft_attention", "softpp_attention")
def test_layer_equals_reference(golden: Golden, dtype: torch.dtype) -> None:
    check_layer(golden, {**SPECS[golden.meta["case"].partition("_")[0]], **kernel_options(golden)}, dtype)


@both_precisions
@of_case("soft_kernel", "softpp_kernel")
def test_mechanism_equals_reference(golden: Golden, dtype: torch.dtype) -> None:
    official = golden.constructor
    spec = {**SPECS[golden.meta["case"].partition("_")[0]], **kernel_options(golden)}
    grid = Grid((golden.kwargs["H"], golden.kwargs["W"]))
    module = linvit.create_attention(spec, dim=official["dim"], num_heads=official["num_heads"], grid=grid)
    check_kernel(golden, module.to(dtype))


def naive(
    module: SoftAttention | SoftNormAttention, q: Tensor, k: Tensor, v: Tensor, grid: Grid, **extra: Tensor
) -> Tensor:
    """`(P Y P^T + T(w_h)) v`, of SOFT++ `P D^-1/2 Y D^-1/2 P^T` with `D = diag(A 1)`."""
    left, kernel, right = naive_parts(module.kernels, q, k, grid)
    middle = naive_inverse(module.inverse, kernel)
    if isinstance(module, SoftNormAttention):
        scale = torch.diag_embed(1 / torch.einsum("bhij->bhi", kernel).sqrt())
        middle = scale @ middle @ scale
    matrix = torch.einsum("bhnl,bhlj,bhmj->bhnm", left, middle, right)
    return (matrix if module.conv is None else matrix + naive_local(module.conv.weight, grid)) @ v


FIRST = Grid((4, 6), num_prefix=1)
FEW: dict[str, Any] = {"ratio": 2, "newton_iters": 4}
SHARED: list[dict[str, Any]] = [
    {"ratio": 2},
    {"ratio": None},
    FEW,
    {**FEW, "alpha_scope": "batch"},
    {"ratio": 2, "conv_size": 0},
    {"ratio": 2, "conv_size": 5},
    {"ratio": 2, "inverse": "solve"},
    {"ratio": 2, "tie_qk": False},
    {"ratio": 2, "key_dim": 5},
]
OF_SOFT = [
    {"ratio": 1},
    {"ratio": 4},
    {"ratio": 2, "landmarks": "avgpool"},
    {"ratio": 2, "landmarks": "random"},
    {"ratio": 2, "landmark_norm": False},
    {"ratio": 2, "landmarks": "avgpool", "landmark_norm": False},
    {**FEW, "newton_alpha": 0.7},
    {**FEW, "inverse_backward": "autograd"},
    {**FEW, "max_backtrack": 10, "newton_beta": 0.7, "backtrack_tol": 1.2},
    {"ratio": 2, "ridge": 0.0},
    {**FEW, "ridge": 0.05},
    {"ratio": 2, "tie_qk": False, "conv_size": 0, "landmarks": "avgpool"},
]
OF_SOFT_NORM = [
    {"ratio": 2, "landmarks": "random", "landmark_norm": False},
    {**FEW, "newton_alpha": 1.8, "ridge": 0.01},
    {**FEW, "newton_beta": 0.7},
    {**FEW, "max_backtrack": 1},
    {**FEW, "max_backtrack": 0},
    {**FEW, "backtrack_tol": 1.0},
    {**FEW, "backtrack_tol": 2.0},
    {**FEW, "inverse_backward": "analytic"},
]


@formulas(
    {
        "soft": (naive, [*SHARED, *OF_SOFT], [FIRST, *GRIDS]),
        "soft_norm": (naive, [*SHARED, *OF_SOFT_NORM], [FIRST, *GRIDS]),
    }
)
def test_equals_formula(spec: dict[str, Any], grid: Grid, naive: Any) -> None:
    assert_formula(spec, grid, naive, 1e-8)


@pytest.mark.parametrize("name", ["soft", "soft_norm"])
@pytest.mark.parametrize("grid", [Grid((4, 6), (2, 3), num_prefix=1), Grid((3, 4), (7, 7))], ids=str)
def test_equals_formula_under_spatial_reduction(grid: Grid, name: str) -> None:
    assert_formula({"name": name, "ratio": 2, "tie_qk": False}, grid, naive, 1e-8)


@pytest.mark.parametrize("name", ["soft", "soft_norm"])
def test_shared_alpha_couples_the_images_of_a_batch(name: str) -> None:
    """The reference's choice of SOFT++; ours is an alpha for every image and head."""
    grid = Grid((4, 6))
    coupled, own = (mechanism({"name": name, **FEW, "alpha_scope": scope}, grid) for scope in ("batch", "head"))
    given = inputs(own, grid)
    alone = given.map(lambda x: x[1:])  # alpha is the other image's
    assert_near(alone(own, grid), given(own, grid)[1:], 1e-13)
    assert relative_error(alone(coupled, grid), given(coupled, grid)[1:]) > 1e-4


@pytest.mark.parametrize("inverse", ["newton", "solve"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blank_image_stays_finite(dtype: torch.dtype, inverse: str) -> None:
    """All landmarks coincide: A has rank 1. Newton's backtracking halves alpha, "solve" has a least ridge."""
    grid = Grid((14, 14))
    module = mechanism({"name": "soft_norm", "inverse": inverse}, grid, dtype=dtype)
    given = inputs(module, grid, dtype=dtype).map(lambda x: torch.zeros_like(x).requires_grad_())
    out = given(module, grid)
    out.sum().backward()
    assert out.isfinite().all()
    assert all(x.grad.isfinite().all() for x in [*given.tensors, *module.parameters()])


def test_defaults_of_soft_norm_are_the_references_but_for_the_batch() -> None:
    inverse = SoftNormAttention(32, 1, Grid((56, 56))).inverse
    assert (inverse.alpha, inverse.ridge, inverse.beta, inverse.iters) == (2.0, 0.0, 0.5, 20)
    assert (inverse.max_backtrack, inverse.backtrack_tol, inverse.backward) == (10, 1.01, "autograd")
    assert inverse.alpha_scope == "head"


def test_what_does_not_go_together_is_refused() -> None:
    grid = Grid((6, 8), (3, 4))
    with pytest.raises(UserError, match=r"got 6x8 for the queries and 3x4 for the keys; .* tie_qk=False"):
        SoftAttention(24, 3, grid)
    module = SoftAttention(24, 3, Grid((6, 8)))
    with pytest.raises(UserError, match="got 6x8 for the queries and 3x4 for the keys"):
        module(torch.randn(1, 3, 48, 8), torch.randn(1, 3, 12, 8), torch.randn(1, 3, 12, 8), grid)
    with pytest.raises(UserError, match=r"newton_alpha=2.0 and ridge=0.01: .* lower newton_alpha to 1.96"):
        SoftNormAttention(24, 3, Grid((14, 14)), ridge=0.01)
