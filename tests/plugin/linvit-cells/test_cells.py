"""The head on a backbone: finite losses with and without boxes, gradients, and detections inside the image."""

import pytest
import torch

import linvit

BOX = {"boxes": torch.tensor([[4.0, 4, 40, 36]]), "labels": torch.tensor([1])}  # x1, y1, x2, y2
EMPTY = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.long)}
IMAGES = [torch.randn(3, 64, 64), torch.randn(3, 45, 61)]


@pytest.mark.parametrize("targets", [[BOX, EMPTY], [EMPTY, EMPTY]], ids=["boxes", "without boxes"])
def test_losses(targets):
    model = linvit.create_detector("pvt_v2_b0", "cells", num_classes=4).train()
    losses = model(IMAGES, targets)
    assert all(loss.isfinite() for loss in losses.values())
    sum(losses.values()).backward()  # without a gradient for each parameter, DDP waits for ever
    assert not [name for name, parameter in model.head.named_parameters() if parameter.grad is None]


@torch.no_grad()
def test_detections():
    model = linvit.create_detector("pvt_v2_b0", "cells", num_classes=4).eval()
    for found, image in zip(model(IMAGES), IMAGES, strict=True):
        height, width = image.shape[-2:]
        assert ((found["boxes"] >= 0) & (found["boxes"] <= torch.tensor([width, height] * 2))).all()
        assert (found["scores"].diff() <= 0).all()
        assert (found["labels"] < 4).all()
