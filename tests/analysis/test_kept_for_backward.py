"""What is kept for backward is read off the tensors that autograd saves."""

import torch
from torch import nn

from linvit.analysis.operations import kept_for_backward


def test_what_is_kept_for_backward_is_counted_once_and_without_parameters():
    layer = nn.Linear(64, 64)
    x = torch.randn(128, 64)

    def work():
        y = layer(x)  # keeps x
        return (y * y + y.view(64, 128).exp().view(128, 64)).sum()  # keeps y twice, and its exponential

    assert kept_for_backward(work, layer) == 3 * x.nbytes
    assert kept_for_backward(work) == 3 * x.nbytes  # the weight of a first layer is not kept: x needs no gradient
    x.requires_grad_()
    assert kept_for_backward(work) == 3 * x.nbytes + layer.weight.nbytes
    assert kept_for_backward(work, layer) == 3 * x.nbytes
