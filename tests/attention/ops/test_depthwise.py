"""The depthwise convolution equals torch's, with gradients of its own on a CPU."""

import pytest
import torch
from torch.nn import functional as F

from linvit.attention.ops import depthwise
from linvit.attention.ops.depthwise import DepthwiseConv2d, convolve_depthwise
from tests.helpers import assert_near, randn


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (7, 7), (9, 9), (1, 5)], ids=str)
@pytest.mark.parametrize("size", [(6, 7), (2, 2), (1, 4)], ids=str)
def test_equals_torch_to_the_second_derivative(shape: tuple[int, int], size: tuple[int, int]) -> None:
    x, kernels, bias = randn(2, 4, *size), randn(4, 1, *shape), randn(4)
    outward = randn(2, 4, *size)

    def derivatives(own: bool) -> list[torch.Tensor]:
        dtype = torch.float32 if own else torch.float64
        sources = [t.to(dtype).requires_grad_() for t in (x, kernels, bias)]
        padding = shape[0] // 2, shape[1] // 2
        out = convolve_depthwise(*sources) if own else F.conv2d(*sources, padding=padding, groups=4)
        first = torch.autograd.grad(out, sources, outward.to(dtype), create_graph=True)
        return [out, *first, *torch.autograd.grad(first[0].square().sum() + first[1].square().sum(), sources[:2])]

    for got, want in zip(derivatives(own=True), derivatives(own=False), strict=True):
        assert got.dtype == torch.float32
        assert_near(got.double(), want, 1e-5)


def test_gradients_are_its_own_where_they_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    own = depthwise._of_kernels
    monkeypatch.setattr(depthwise, "_of_kernels", lambda *args: calls.append(1) or own(*args))
    x = randn(1, 4, 5, 5, dtype=torch.float32)
    DepthwiseConv2d(4, 5)(x).sum().backward()
    assert len(calls) == 1
    DepthwiseConv2d(4, 3)(x).sum().backward()  # which torch does well
    DepthwiseConv2d(4, 5).double()(x.double()).sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        out = DepthwiseConv2d(4, 5)(x)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert len(calls) == 1


def test_sums_over_many_positions_keep_their_digits() -> None:
    """Added up one by one over all images they lose one more."""
    x, kernels, outward = randn(64, 4, 40, 40), randn(4, 1, 5, 5, grad=True), randn(64, 4, 40, 40, seed=1)
    (want,) = torch.autograd.grad(F.conv2d(x, kernels, padding=2, groups=4), kernels, outward)
    single = kernels.detach().float().requires_grad_()
    (found,) = torch.autograd.grad(convolve_depthwise(x.float(), single), single, outward.float())
    assert_near(found.double(), want, 3e-6)
