"""What is computed on a GPU alone has the values and gradients of what is computed on a CPU.

The branches for a GPU run here, on the CPU: all tensors say that they are there.
"""

import copy

import pytest
import torch
from torch import Tensor, nn

from linvit import AttentionLayer, Grid, create_detector
from linvit.heads.detection.rpn import RPN
from linvit.registry import attentions, heads
from tests.families import narrow, small
from tests.helpers import own_names

GRID = Grid((4, 6))


@pytest.fixture
def as_on_cuda(monkeypatch):
    """Begins to pretend: a function without arguments."""
    enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype

    def begin() -> None:
        monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: enabled("cpu"))
        monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: dtype("cpu"))
        for name in ("mm", "bmm"):  # whose results are in another dtype than their factors on CUDA alone
            monkeypatch.setattr(torch, name, lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype))

    return begin


def step(layer: AttentionLayer, x: Tensor, weights: Tensor) -> list[Tensor]:
    """Output and gradients; what is drawn is always the same."""
    torch.manual_seed(1)
    x = x.requires_grad_()
    out = layer(x, GRID)
    return [out, *torch.autograd.grad((out * weights).sum(), [x, *layer.parameters()])]


def error(found: list[Tensor], true: list[Tensor]) -> float:
    """The largest relative error, root mean square of each tensor."""
    return max(float((a - b).norm() / b.norm().clamp(min=1e-3)) for a, b in zip(found, true, strict=True))


@pytest.mark.parametrize("recompute", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", sorted(own_names(attentions)))
def test_attention(as_on_cuda, name, recompute):
    torch.manual_seed(0)
    layer = AttentionLayer(24, 3, GRID, attention=name).double()
    for module in layer.modules():
        if hasattr(module, "recompute"):
            module.recompute = recompute
    x, weights = torch.randn(2, 2, 24, 24, dtype=torch.float64)

    def in_all_precisions() -> tuple[list[Tensor], ...]:
        double = step(layer.double(), x, weights)
        single = step(layer.float(), x.float(), weights.float())
        with torch.autocast("cpu", torch.bfloat16):
            return double, single, step(layer, x.float(), weights.float())

    double, single, half = in_all_precisions()
    as_on_cuda()
    found_double, found_single, found_half = in_all_precisions()
    assert error(found_double, double) < 1e-12
    assert error(found_single, single) < 1e-4
    assert error(found_half, single) < max(2 * error(half, single), 0.02)


@pytest.mark.parametrize("head", sorted(name for name in own_names(heads) if heads.get(name).task == "detection"))
def test_detectors(as_on_cuda, head):
    torch.manual_seed(0)
    levels = {} if head == "retinanet" else {"finest_scale": 8}  # boxes are cut out of all maps
    detector = create_detector(small("pvt_v2_b0"), {**narrow(head), **levels}, 3, "linear", 64)
    for layer in [*detector.head.classifiers(), *(one for one in detector.modules() if isinstance(one, RPN))]:
        for weight in layer.parameters():
            nn.init.normal_(weight, std=0.1)
    images = [torch.randn(3, 64, 64), torch.randn(3, 50, 61)]
    boxes = torch.tensor([[4.0, 4, 40, 40], [8, 8, 30, 20]])
    targets = [
        {"boxes": boxes, "labels": torch.tensor([0, 2]), "masks": torch.rand(2, *image.shape[1:]).round().byte()}
        for image in images
    ]

    def both() -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
        torch.manual_seed(1)
        own = copy.deepcopy(detector)  # training changes statistics
        losses = own.train()(images, targets)
        with torch.no_grad():
            return losses, own.eval()(images, sizes=[(64, 64), (100, 122)])

    losses, found = both()
    as_on_cuda()
    torch.testing.assert_close(both(), (losses, found), rtol=1e-4, atol=1e-4)
    assert all(len(one["boxes"]) > 5 for one in found)
    assert not detector.with_masks or any(one["masks"].any() for one in found)
