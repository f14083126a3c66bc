"""The head on a backbone: the shape of the logits, and a gradient for every parameter."""

import pytest
import torch

import linvit


@pytest.mark.parametrize("size", [(64, 64), (45, 61)])
def test_skip_fcn(size):
    model = linvit.create_segmentor("pvt_v2_b0", "skip_fcn", num_classes=4).train()
    logits, others = model(torch.randn(2, 3, *size), auxiliary=True)  # (B, classes, H, W)
    assert [maps.shape for maps in (logits, *others)] == [(2, 4, *size)] * (1 + len(others))
    sum(maps.sum() for maps in (logits, *others)).backward()
    assert not [name for name, parameter in model.head.named_parameters() if parameter.grad is None]
