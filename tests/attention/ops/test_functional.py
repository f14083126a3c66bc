"""The shared mathematics: properties of the focused function, linear attention's factors, resizing of tables."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from linvit.attention.ops.activations import focus, normalize
from linvit.attention.ops.functional import (
    resize_tokens,
)
from linvit.attention.ops.linear import linear_attention
from tests.helpers import assert_near, randn

entries = st.one_of(st.just(0.0), st.floats(1e-3, 1.0))
vectors = st.lists(entries, min_size=1, max_size=12).map(lambda x: torch.tensor(x, dtype=torch.float64))
powers = st.floats(1.0, 32.0)


def f(x: Tensor, p: float) -> Tensor:
    """`f_p` of vectors."""
    return focus(x, p)


@given(vectors, powers)
def test_focus_is_the_literal_formula(x: Tensor, p: float) -> None:
    assume(x.max() > 0)
    literal = x.norm() * x**p / (x**p).norm()
    torch.testing.assert_close(f(x, p), literal, rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("p", [1, 3, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_focus_of_zero_is_zero_with_a_finite_gradient(p: float, dtype: torch.dtype) -> None:
    x = torch.zeros(2, 5, dtype=dtype, requires_grad=True)
    y = f(x, p)
    y.sum().backward()
    assert (y == 0).all()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("p", [1, 2.5, 3, 8])
def test_gradient_of_focus_is_that_of_finite_differences(p: float) -> None:
    x = (randn(3, 5).abs() + 0.1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: f(x, p), x)
    assert torch.autograd.gradgradcheck(lambda x: f(x, p), x)
    tied = torch.tensor([[1.0, 1.0, 0.5]], dtype=torch.float64, requires_grad=True)  # two largest entries
    assert torch.autograd.gradcheck(lambda x: f(x, p), tied)


@pytest.mark.parametrize("size", [1e-18, 1e-6, 1e6, 1e18])
def test_focus_in_float32_at_extreme_sizes(size: float) -> None:
    x = randn(4, 16).abs() * size
    assert_near(f(x.float(), 32), f(x.float().double(), 32), 1e-5)


@pytest.mark.parametrize("dims", [(-1,), (1, 3)])
@pytest.mark.parametrize("order", [1, 2])
def test_unit_vectors_have_length_one_or_less_below_eps(order: float, dims: tuple[int, ...]) -> None:
    x = randn(2, 3, 5, 4)
    lengths = x.abs().pow(order).sum(dims, keepdim=True) ** (1 / order)
    assert_near(normalize(x, 1e-12, order, dims), x / lengths, 1e-13)
    eps = float(lengths.median())
    assert_near(normalize(x, eps, order, dims), x / lengths.clamp(min=eps), 1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("eps", [0.0, 1e-12])
@pytest.mark.parametrize("order", [1, 2])
def test_unit_of_zero_is_zero_with_the_gradient_handed_on(order: float, eps: float, dtype: torch.dtype) -> None:
    x = randn(3, 5, dtype=dtype)
    x[1] = 0
    x.requires_grad_()
    y = normalize(x, eps, order)
    gradient = torch.autograd.grad(y, x, torch.full_like(y, 0.5))[0]
    assert (y[1] == 0).all()
    assert (gradient[1] == 0.5).all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("dims", [(-1,), (0, 2)])
def test_derivatives_of_unit_vectors(dims: tuple[int, ...]) -> None:
    """Of the first and second order, of norms above and below eps."""
    x = (randn(2, 3, 4) * torch.tensor([1e-3, 1, 2])[:, None]).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: normalize(x, 0.1, dims=dims), x, eps=1e-7)
    assert torch.autograd.gradgradcheck(lambda x: normalize(x, 0.1, dims=dims), x, eps=1e-7)


def test_unit_of_nan_is_nan() -> None:
    x = randn(3, 5)
    x[1, 2] = torch.nan
    assert normalize(x, 1e-12).isnan().all(1).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.bfloat16, 1e-2), (torch.float16, 1e-3), (torch.float32, 1e-6), (torch.float64, 1e-14)],
)
def test_resize_is_as_precise_as_its_dtype(dtype: torch.dtype, tolerance: float) -> None:
    """float64 stays float64: the table is not rounded on the way."""
    table = randn(1, 12, 5)
    grid = table.mT.unflatten(2, (3, 4))
    exact = torch.nn.functional.interpolate(grid, size=(7, 5), mode="bicubic").flatten(2).mT
    resized = resize_tokens(table.to(dtype), (3, 4), (7, 5))
    assert resized.dtype == dtype
    assert_near(resized, exact, tolerance)


def test_a_least_denominator_has_no_gradient_where_it_is_taken() -> None:
    """In bfloat16, too, whose derivative is written by hand."""
    given = [randn(2, 3, 9, width).abs() for width in (4, 4, 5)]
    exact, rounded = ([x.to(dtype).requires_grad_() for x in given] for dtype in (torch.float64, torch.bfloat16))
    divisors = given[0] @ given[1].sum(-2, keepdim=True).mT
    below, above = divisors.flatten().sort().values[22:24]
    least = float(below + above) / 2  # of nearly half of the queries, and farther from each than bfloat16 rounds
    want = given[0] @ (given[1].mT @ given[2]) / divisors.clamp_min(least)
    outputs = [linear_attention(*inputs, least, least=True) for inputs in (exact, rounded)]
    assert_near(outputs[0], want, 1e-12)
    gradients = [torch.autograd.grad(out.sum(), inputs) for out, inputs in zip(outputs, (exact, rounded), strict=True)]
    for near, far in zip(*gradients, strict=True):
        assert (near - far).norm() < 0.02 * near.norm()
