"""The first layer that is not finite, forward and backward."""

import math

import pytest
import torch
from torch import nn

from linvit.analysis.non_finite import bad_samples, find_non_finite


class Root(nn.Module):
    """The square root of a sum of squares: its gradient at 0 is NaN."""

    def forward(self, x):
        return x.square().sum(1, keepdim=True).sqrt() + x


def network():
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(inplace=True), Root()), nn.Linear(4, 2))


def test_finite_is_none_and_gradients_stay():
    net, x = network(), torch.randn(6, 4)
    assert find_non_finite(net, lambda: net(x).sum(), 6) is None
    assert all(weight.grad is None for weight in net.parameters())
    assert not any(module._forward_hooks for module in net.modules())


def test_forward_the_innermost_layer_and_its_samples():
    net, x = network(), torch.randn(6, 4)
    x[[2, 5], 1] = torch.tensor([math.nan, math.inf])
    found = find_non_finite(net, lambda: net(x).sum(), 6)
    assert found == ("the output of layer '0' (Linear)", [2, 5])
    with torch.no_grad():
        net[2].bias[0] = math.nan
    assert find_non_finite(net, lambda: net(torch.ones(3, 4)).sum(), 3).where == "the output of layer '2' (Linear)"


def test_backward_the_layer_and_the_operation():
    net = network()
    with torch.no_grad():
        net[0].weight.zero_(), net[0].bias.zero_()
    found = find_non_finite(net, lambda: net(torch.randn(6, 4)).sum(), 6)
    assert found.where == "the gradient of layer '1.1' (Root), in SqrtBackward0"


def test_the_loss_itself():
    net = network()
    found = find_non_finite(net, lambda: net(torch.randn(6, 4)).sum() / 0.0, 6)
    assert found.where == "the loss, computed from finite outputs"
    found = find_non_finite(net, lambda: (net(torch.randn(6, 4)).sum() * 0).sqrt(), 6)
    assert found.where == "the gradient of the loss, in SqrtBackward0"


@pytest.mark.parametrize(("shape", "expected"), [((4, 3), [1]), ((8, 3), [0]), ((3, 4), []), ((), [])])
def test_samples_of_windows_and_of_no_batch(shape, expected):
    tensor = torch.zeros(shape)
    if shape:
        tensor[1] = math.nan
    assert bad_samples(tensor, 4) == expected
