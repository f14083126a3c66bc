"""Feature maps entry by entry: their values, and gradients of their own."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from linvit.attention.ops.activations import by_sign, elu_plus_one, focused, signed_powers
from tests.helpers import assert_near, randn

Map = Callable[[Tensor], Tensor]
FLOATS = torch.float64, torch.float32
POWER = torch.tensor(1.5, dtype=torch.float64)


def powers(x: Tensor) -> Tensor:
    return signed_powers(x, POWER)


FORMULAS: dict[Map, Map] = {elu_plus_one: lambda x: F.elu(x) + 1, powers: lambda x: by_sign(x.abs() ** POWER, x)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_elu_plus_one_keeps_its_digits_and_has_a_derivative_everywhere(dtype: torch.dtype) -> None:
    x = torch.tensor([-80.0, -17.0, -1.0, 0.0, 1e-3, 300.0], dtype=dtype, requires_grad=True)
    y = elu_plus_one(x)
    exact = x.detach().double()
    want = torch.where(exact > 0, exact + 1, exact.clamp(max=0).exp())
    torch.testing.assert_close(y.double(), want, rtol=4 * torch.finfo(dtype).eps, atol=0)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient.double(), want.clamp(max=1), rtol=4 * torch.finfo(dtype).eps, atol=0)
    assert elu_plus_one(torch.tensor(math.nan)).isnan()


@pytest.mark.parametrize("features", FORMULAS)
def test_gradients_are_those_of_the_formula_and_compiled_code_keeps_no_mask_of_booleans(features: Map) -> None:
    x = randn(5, 5).requires_grad_()

    def run(features: Map) -> Tensor:
        return features(x @ x).sum(0)

    kept: list[torch.dtype] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.dtype) or x, lambda x: x):
        compiled = torch.compile(run, backend="aot_eager_decomp_partition", fullgraph=True)(features)
    for result in (run(features), compiled):
        (found,), (want,) = (torch.autograd.grad(y.sum(), x) for y in (result, run(FORMULAS[features])))
        assert_near(found, want, 1e-14)
    assert set(kept) == {torch.float64}


@pytest.mark.parametrize("features", FORMULAS)
def test_second_derivatives(features: Map) -> None:
    x = randn(5, 8).requires_grad_()
    assert torch.autograd.gradcheck(features, x)
    assert torch.autograd.gradgradcheck(features, x)


def test_powers_have_gradients_also_of_the_power_and_of_zeros() -> None:
    x, power = randn(2, 3, 5, 4), 1 + torch.rand(1, 3, 1, 4, dtype=torch.float64)
    assert torch.autograd.gradcheck(signed_powers, (x.requires_grad_(), power.requires_grad_()))
    assert torch.autograd.gradgradcheck(signed_powers, (x, power))
    zeros = torch.zeros_like(x).requires_grad_()
    found = torch.autograd.grad(signed_powers(zeros, power).sum(), (zeros, power))
    assert not any(gradient.any() for gradient in found)


@pytest.mark.parametrize("features", FORMULAS)
def test_transforms_of_torch_func_compiled(features: Map) -> None:
    gradients = torch.func.vmap(torch.func.grad(lambda x: features(x).sum()))
    x = randn(5, 5)
    # In more than one graph: dynamo breaks where it is asked for the level of a transform.
    assert_near(torch.compile(gradients, backend="aot_eager")(x), gradients(x), 1e-14)


@pytest.mark.parametrize("all_heads", [True, False])
@pytest.mark.parametrize("size", [1e-25, 1.0, 1e25])
def test_focused_features_of_any_size_have_digits_and_gradients(size: float, all_heads: bool) -> None:
    """Squares of such norms leave the range of float32."""
    x, shift = size * randn(2, 7, 3, 4), size * randn(1, 7, 3, 4, seed=1)
    factor = torch.linspace(0.5, 2, 12, dtype=torch.float64).view(3, 4)
    exact, rounded = ([each.to(dtype).requires_grad_() for each in (x, shift, factor)] for dtype in FLOATS)
    found, want = (
        torch.stack(focused([x, x], shift, factor, 0.0, 3.0, all_heads, x.dtype))
        for x, shift, factor in (rounded, exact)
    )
    assert_near(found, want, 1e-5)
    weights = randn(*want.shape, seed=2)
    pairs = zip(
        torch.autograd.grad((found * weights.float()).sum(), rounded),
        torch.autograd.grad((want * weights).sum(), exact),
        strict=True,
    )
    for got, true in pairs:
        assert_near(got / got.abs().max(), true / true.abs().max(), 1e-5)
