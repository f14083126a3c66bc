"""Products of heads that lie side by side equal torch's, whoever differentiates, and copy nothing."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import linvit
from linvit.attention.ops import products
from linvit.attention.ops.products import matmul, side_by_side
from tests.helpers import assert_near, mechanism, randn


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small heads, too, are multiplied image by image."""
    monkeypatch.setattr(products, "LEAST", {torch.get_num_threads(): 1})


def heads(tokens: int, width: int, seed: int = 0) -> Tensor:
    """(2, 3, N, d) in float64, as a host splits heads."""
    return randn(2, tokens, 3, width, seed=seed, dtype=torch.float64).transpose(1, 2).requires_grad_()


PAIRS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "tokens by matrix": lambda: (heads(5, 4), randn(2, 3, 4, 6, seed=1, dtype=torch.float64, grad=True)),
    "sum over tokens": lambda: (heads(5, 4).mT, heads(5, 6, seed=1)),
    "tokens by tokens": lambda: (heads(5, 4), heads(7, 4, seed=1).mT),
    "heads apart by tokens": lambda: (randn(2, 3, 6, 5, dtype=torch.float64, grad=True), heads(5, 4)),
}
pairs = pytest.mark.parametrize("pair", PAIRS.values(), ids=list(PAIRS))


@pairs
def test_products_and_derivatives(any_size: None, pair: Callable[[], tuple[Tensor, Tensor]]) -> None:
    a, b = pair()
    assert side_by_side(a) or side_by_side(b)
    assert_near(matmul(a, b), a @ b, 1e-15)
    assert torch.autograd.gradcheck(matmul, (a, b))
    assert torch.autograd.gradgradcheck(matmul, (a, b))


@pairs
def test_gradients_lie_like_what_they_are_of(any_size: None, pair: Callable[[], tuple[Tensor, Tensor]]) -> None:
    a, b = pair()
    out = matmul(a, b)
    if a.stride(-1) == 1:
        assert (out.stride(1) < out.stride(2)) == side_by_side(a)
    for given, found in zip((a, b), torch.autograd.grad(out.square().sum(), (a, b)), strict=True):
        assert found.stride() == given.stride()


@pairs
def test_many_gradients_at_once(any_size: None, pair: Callable[[], tuple[Tensor, Tensor]]) -> None:
    a, b = pair()
    one, many = (
        torch.autograd.functional.jacobian(lambda *ab: matmul(*ab).sum(3), (a, b), vectorize=vectorize)
        for vectorize in (False, True)
    )
    for found, want in zip(many, one, strict=True):
        assert_near(found, want, 1e-14)


def test_a_product_may_be_changed_in_place(any_size: None) -> None:
    q, context = PAIRS["tokens by matrix"]()
    (found,) = torch.autograd.grad(matmul(q, context).mul_(2).square().sum(), q)
    (want,) = torch.autograd.grad((2 * (q @ context)).square().sum(), q)
    assert_near(found, want, 1e-14)


def test_where_torch_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small or contiguous heads, one head or image, other devices, autocast, compiled code, torch.func, threads."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    large = torch.empty(2, 2**13, 2, 8).transpose(1, 2)
    assert side_by_side(large)
    others = [large[:, :, :64], large[:, :1], large[:1], large.contiguous(), large.to("meta")]
    assert not any(map(side_by_side, others))
    with torch.autocast("cpu", torch.bfloat16):
        assert not side_by_side(large)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 3)
        assert not side_by_side(large)
    seen = []
    torch.func.vmap(lambda x: seen.append(side_by_side(x)) or x)(torch.stack([large]))
    compiled = torch.compile(lambda x: x + side_by_side(x), backend="eager", fullgraph=True)
    assert seen == [False]
    assert_near(compiled(torch.zeros_like(large)), torch.zeros_like(large), 0)


@pytest.mark.parametrize("name", ["focused", "linear", "taylor", "flow", "inline", "linear_angular", "efficient"])
def test_mechanisms_compute_the_same(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    grid = linvit.Grid((4, 6))
    of = mechanism(name, grid)

    def gradients(least: dict[int, int]) -> list[Tensor]:
        monkeypatch.setattr(products, "LEAST", least)
        given = [randn(2, 24, of.num_heads, 8, seed=i, dtype=torch.float64, grad=True) for i in range(3)]
        extra = {"x": randn(2, 24, of.dim, seed=4, dtype=torch.float64)} if of.takes_input else {}
        out = of(*(x.transpose(1, 2) for x in given), grid, **extra)
        return [out, *torch.autograd.grad(out.square().sum(), given)]

    for found, want in zip(gradients({torch.get_num_threads(): 1}), gradients({}), strict=True):
        assert_near(found, want, 1e-12)
