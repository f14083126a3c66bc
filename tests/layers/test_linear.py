"""The linear layer is torch's, compiled or not."""

import pytest
import torch
from torch import nn

from linvit.attention.ops.cast_linear import cast_linear
from linvit.layers.mlp import Linear
from tests.helpers import randn


def test_exported_it_is_one_operation() -> None:
    program = torch.export.export(Linear(4, 3), (torch.ones(2, 4),))
    assert [node.target for node in program.graph.nodes if node.op == "call_function"] == [
        torch.ops.aten.linear.default
    ]


@pytest.mark.parametrize(("shape", "bias"), [((2, 5, 4), True), ((2, 5, 4), False), ((4,), True)])
def test_on_a_gpu_under_autocast_it_has_the_derivatives_of_a_linear_layer(shape: tuple[int, ...], bias: bool) -> None:
    x, *parameters = (randn(*each).requires_grad_() for each in [shape, (3, 4), (3,)][: 2 + bias])
    assert torch.equal(cast_linear(x, *parameters), nn.functional.linear(x, *parameters))
    assert torch.autograd.gradcheck(cast_linear, (x, *parameters))
    assert torch.autograd.gradgradcheck(cast_linear, (x, *parameters))


def test_gradients_of_its_wide_parameters_are_not_rounded_to_half_precision() -> None:
    x, weight, bias = (randn(*shape).bfloat16() for shape in [(200, 4), (3, 4), (3,)])
    gradient = randn(200, 3).bfloat16()
    wide = [parameter.float().requires_grad_() for parameter in (weight, bias)]
    out = cast_linear(x.requires_grad_(), *wide)
    assert out.dtype == torch.bfloat16
    of_x, of_weight, of_bias = torch.autograd.grad(out, [x, *wide], gradient)
    assert torch.equal(of_x, gradient @ weight)
    torch.testing.assert_close(of_weight, (gradient.double().mT @ x.double()).float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(of_bias, gradient.double().sum(0).float(), rtol=1e-5, atol=1e-5)
