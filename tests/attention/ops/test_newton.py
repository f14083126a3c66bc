"""Newton's inverse equals the references, the iteration written out, and what the papers prove of it."""

import pytest
import torch
from torch import Tensor, nn

from linvit.attention.ops.softmax_free import NewtonInverse
from tests.attention.soft_formula import naive_gaussian, naive_inverse
from tests.golden_files import Golden, both_precisions, of_case
from tests.helpers import assert_near, assert_same_gradients, randn

SOFT = {
    "method": "newton",
    "iters": 20,
    "alpha": 1.8,
    "ridge": 0.01,
    "beta": 0.5,
    "max_backtrack": 0,
    "backtrack_tol": 1.01,
    "alpha_scope": "head",
    "backward": "analytic",
}
NORM = {**SOFT, "alpha": 2.0, "ridge": 0.0, "max_backtrack": 10, "backward": "autograd"}


def kernels(*shape: int, width: int = 4, scale: float = 1.0, seed: int = 0, grad: bool = False) -> Tensor:
    """Gaussian kernel matrices (*shape, m) -> (..., m, m) of random points."""
    points = scale * randn(*shape, width, seed=seed)
    return naive_gaussian(points, points).requires_grad_(grad)


def mirror(kernel: Tensor) -> Tensor:
    """Symmetric whatever its entries: finite differences and the largest row sum agree on what moves together."""
    return (kernel + kernel.mT) / 2


# The reference implementations


@both_precisions
@of_case("soft_newton_inverse")
def test_equals_soft(golden: Golden, dtype: torch.dtype) -> None:
    (kernel,) = matrices = golden.inputs(dtype)
    golden.check_call(NewtonInverse(**{**SOFT, "iters": golden.constructor["max_iter"]})(kernel), matrices)


@both_precisions
@of_case("softpp_newton_inverse")
def test_equals_soft_norm(golden: Golden, dtype: torch.dtype) -> None:
    (kernel,) = matrices = golden.inputs(dtype)
    inverse = NewtonInverse(**{**NORM, "iters": golden.constructor["max_iter"], "alpha_scope": "batch"})
    golden.check_call(inverse(kernel), matrices)


# The formula


@pytest.mark.parametrize("backward", ["analytic", "autograd"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"iters": 3},
        {"iters": 1},
        {"alpha": 0.5, "iters": 5},
        {"ridge": 0.0},
        {"ridge": 0.2, "alpha": 1.0},
        {"alpha_scope": "batch", "iters": 4},
        {"max_backtrack": 10, "iters": 3},
        {"max_backtrack": 1, "iters": 3},
        {"max_backtrack": 4, "beta": 0.7, "iters": 3},
        {"max_backtrack": 10, "backtrack_tol": 2.0, "iters": 3},
        {"max_backtrack": 10, "alpha_scope": "batch", "iters": 3},
        {"method": "solve"},
        {"method": "solve", "ridge": 0.0},
    ],
    ids=str,
)
def test_equals_formula(options: dict[str, object], backward: str) -> None:
    inverse = NewtonInverse(**{**SOFT, "backward": backward, **options})
    matrix = torch.cat([kernels(1, 3, 6), kernels(1, 3, 6, scale=0.5, seed=1)]).requires_grad_()
    # Both sides get the symmetric part, since a row sum of one is a column sum of the other.
    assert_same_gradients(inverse(mirror(matrix)), naive_inverse(inverse, mirror(matrix)), [matrix], 1e-9)


@pytest.mark.parametrize("options", [SOFT | {"iters": 40}, NORM, NORM | {"iters": 3}, SOFT | {"method": "solve"}])
def test_gradients_are_those_of_finite_differences(options: dict[str, object]) -> None:
    """The analytic gradient too, once the iteration has converged (SOFT, Proposition 2)."""
    matrix = kernels(2, 1, 4, scale=1.5, grad=True)
    inverse = NewtonInverse(**options)
    assert torch.autograd.gradcheck(lambda x: inverse(mirror(x)), matrix)


@pytest.mark.parametrize("options", [SOFT, NORM], ids=["soft", "soft_norm"])
def test_exported_program_keeps_the_gradient(options: dict[str, object]) -> None:
    class Module(nn.Module):
        def forward(self, matrix: Tensor) -> Tensor:
            return NewtonInverse(**{**options, "iters": 3})(matrix)

    matrix = kernels(2, 3, 6, grad=True)
    exported = torch.export.export(Module(), (matrix,)).module()
    assert_same_gradients(exported(matrix), Module()(matrix), [matrix], 1e-13)


# What the papers prove


@pytest.mark.parametrize("m", [3, 49])
def test_backtracking_saves_a_kernel_of_equal_landmarks(m: int) -> None:
    """`I - alpha A^2` has norm 3 - 4 / m at the paper's start; halved, it leads to the pseudo-inverse."""
    ones = torch.ones(1, 1, m, m)
    assert_near(NewtonInverse(**NORM)(ones), ones / m**2, 1e-4)


@pytest.mark.parametrize(
    ("m", "spread", "dtype"), [(49, 0.0, torch.float32), (49, 1e-4, torch.float32), (2, 1e-9, torch.float64)], ids=str
)
def test_solve_saves_a_kernel_of_equal_and_of_similar_landmarks(m: int, spread: float, dtype: torch.dtype) -> None:
    """`A Y A = A`, as for a pseudo-inverse, and a finite gradient."""
    matrix = kernels(1, 2, m, scale=spread).to(dtype).requires_grad_()
    inverse = NewtonInverse(**{**NORM, "method": "solve"})(matrix)
    assert_near(matrix @ inverse @ matrix, matrix, 0.05)
    inverse.sum().backward()
    assert matrix.grad.isfinite().all()


def test_solve_takes_the_larger_of_ridge_and_rounding() -> None:
    matrix = kernels(1, 2, 6).float()
    got = NewtonInverse(**{**SOFT, "method": "solve", "ridge": 0.1})(matrix)
    assert_near(got, torch.linalg.inv(matrix.double() + 0.1 * torch.eye(6)), 1e-6)


# Batch


@pytest.mark.parametrize("method", ["newton", "solve"])
def test_nan_and_singular_matrices_raise_nothing(method: str) -> None:
    inverse = NewtonInverse(**{**NORM, "method": method})
    assert inverse(torch.full((1, 1, 3, 3), torch.nan)).isnan().all()
    assert inverse(torch.ones(1, 1, 3, 3)).shape == (1, 1, 3, 3)
