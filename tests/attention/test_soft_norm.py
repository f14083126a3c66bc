"""SOFT++ equals its reference code and, option by option, the formula written out naively."""

import pytest
import torch
from torch import Tensor

import linvit
from linvit import Grid, UserError
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
from tests.helpers import assert_near, assert_same_gradients, inputs, mechanism, relative_error

# The reference implementation, whose alpha is one for the batch


@both_precisions
@of_case("softpp_attention")
def test_layer_equals_soft_norm(golden: Golden, dtype: torch.dtype) -> None:
    check_layer(golden, {"name": "soft_norm", "alpha_scope": "batch", **kernel_options(golden)}, dtype)


@both_precisions
@of_case("softpp_kernel")
def test_mechanism_equals_soft_norm(golden: Golden, dtype: torch.dtype) -> None:
    official = golden.constructor
    grid = Grid((golden.kwargs["H"], golden.kwargs["W"]))
    options = {"alpha_scope": "batch", **kernel_options(golden)}
    check_kernel(golden, SoftNormAttention(official["dim"], official["num_heads"], grid, **options).to(dtype))


# The formula


def naive_matrix(module: SoftNormAttention, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
    """`P D^-1/2 Y D^-1/2 P^T + T(w_h)` with `D = diag(A 1)`, (B, h, N, M)."""
    left, kernel, right = naive_parts(module.kernels, q, k, grid)
    scale = torch.diag_embed(1 / torch.einsum("bhij->bhi", kernel).sqrt())
    middle = scale @ naive_inverse(module.inverse, kernel) @ scale
    matrix = torch.einsum("bhnl,bhlj,bhmj->bhnm", left, middle, right)
    return matrix if module.conv is None else matrix + naive_local(module.conv.weight, grid)


def check(options: dict[str, object], grid: Grid, **context: int) -> None:
    """Output and the gradients of inputs and parameters equal the formula's."""
    module = mechanism({"name": "soft_norm", "ratio": 2, **options}, grid, **context)
    given = inputs(module, grid, grad=True)
    want = naive_matrix(module, given.q, given.k, grid) @ given.v
    assert_same_gradients(given(module, grid), want, [*given.tensors, *module.parameters()], 1e-8)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ratio": None},
        {"landmarks": "random", "landmark_norm": False},
        {"newton_iters": 4},
        {"newton_iters": 4, "alpha_scope": "batch"},
        {"newton_iters": 4, "newton_alpha": 1.8, "ridge": 0.01},
        {"newton_iters": 4, "newton_beta": 0.7},
        {"newton_iters": 4, "max_backtrack": 1},
        {"newton_iters": 4, "max_backtrack": 0},
        {"newton_iters": 4, "backtrack_tol": 1.0},
        {"newton_iters": 4, "backtrack_tol": 2.0},
        {"newton_iters": 4, "inverse_backward": "analytic"},
        {"conv_size": 0},
        {"conv_size": 5},
        {"inverse": "solve"},
        {"tie_qk": False},
    ],
    ids=str,
)
def test_equals_formula(options: dict[str, object]) -> None:
    check(options, Grid((4, 6), num_prefix=1))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_equals_formula_on_any_grid(grid: Grid) -> None:
    check({"newton_iters": 8}, grid)


@pytest.mark.parametrize("grid", [Grid((4, 6), (2, 3), num_prefix=1), Grid((3, 4), (7, 7))], ids=str)
def test_equals_formula_under_spatial_reduction(grid: Grid) -> None:
    check({"tie_qk": False, "newton_alpha": 1.8}, grid)


def test_equals_formula_with_narrow_keys() -> None:
    check({}, Grid((4, 6)), key_dim=5)


@pytest.mark.parametrize("options", [{}, {"newton_iters": 4}, {"inverse": "solve", "ridge": 0.01}])
def test_gradients_are_those_of_finite_differences(options: dict[str, object]) -> None:
    grid = Grid((2, 6), num_prefix=1)
    module = mechanism({"name": "soft_norm", "ratio": 2, **options}, grid, dim=4, num_heads=2)
    q, _, v, _ = inputs(module, grid, batch=1, grad=True)
    assert torch.autograd.gradcheck(lambda q, v, *_: module(q, q, v, grid), (q, v, *module.parameters()))


# What the paper proves


# The equivalent matrix


def test_shared_alpha_couples_the_images_of_a_batch() -> None:
    """The reference's choice; ours is an alpha for every image and head."""
    grid = Grid((4, 6))
    coupled, own = (
        mechanism({"name": "soft_norm", "ratio": 2, "newton_iters": 4, "alpha_scope": scope}, grid)
        for scope in ("batch", "head")
    )
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


# Defaults, errors


def test_defaults_are_the_references_but_for_the_batch() -> None:
    inverse = SoftNormAttention(32, 1, Grid((56, 56))).inverse
    assert (inverse.alpha, inverse.ridge, inverse.beta, inverse.iters) == (2.0, 0.0, 0.5, 20)
    assert (inverse.max_backtrack, inverse.backtrack_tol, inverse.backward) == (10, 1.01, "autograd")
    assert inverse.alpha_scope == "head"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ridge": 0.01}, "newton_alpha=2.0 and ridge=0.01: .* lower newton_alpha to 1.96"),
        ({"conv_size": 4}, "conv_size must be odd"),
    ],
    ids=str,
)
def test_bad_option_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        linvit.create_attention({"name": "soft_norm", **options}, dim=24, num_heads=3, grid=Grid((14, 14)))
