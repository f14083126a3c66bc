"""Every detector on every family of backbones: losses with gradients, detections, on images of odd sizes."""

from typing import Any

import pytest
import torch

import linvit
from linvit.heads.create import heads_of
from tests.families import families, narrow, small
from tests.helpers import leaves

FAMILIES = families()
DETECTORS = heads_of("detection")


def check(head: str, backbone: Any, **options: Any) -> None:
    """A step of training with and without boxes, and detections."""
    torch.manual_seed(0)
    model = linvit.create_detector(backbone, narrow(head), num_classes=3, img_size=64, **options)
    images = [torch.randn(3, 64, 64), torch.randn(3, 61, 90)]
    boxes = torch.tensor([[4.0, 6, 40, 50]])
    masks = torch.zeros(1, 64, 64, dtype=torch.uint8)
    masks[0, 6:50, 4:40] = 1
    full = {"boxes": boxes, "labels": torch.tensor([1]), "masks": masks}
    empty = {"boxes": boxes[:0], "labels": torch.zeros(0, dtype=torch.long), "masks": torch.zeros(0, 61, 90).byte()}
    nothing = sum(model(images, [empty | {"masks": torch.zeros(0, *x.shape[1:]).byte()} for x in images]).values())
    reached = leaves(nothing)  # also where a rank has no object: DistributedDataParallel fails otherwise
    assert not [name for name, weight in model.named_parameters() if weight.requires_grad and id(weight) not in reached]
    losses = model(images, [full, empty])
    assert all(loss.isfinite() for loss in losses.values())
    sum(losses.values()).backward()
    without = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not without
    with torch.no_grad():
        found = model.eval()(images, sizes=[(80, 80), (61, 90)])
    for one, size in zip(found, [(80, 80), (61, 90)], strict=True):
        assert len(one["boxes"]) == len(one["labels"]) == len(one["scores"])
        if model.with_masks:
            assert one["masks"].shape == (len(one["boxes"]), *size)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_backbones(family: str) -> None:
    """Each detector in turn, so that all are met, and the quickest most often."""
    index = list(FAMILIES).index(family)
    head = "cascade_mask_rcnn" if index == 0 else ("retinanet", "mask_rcnn", "faster_rcnn")[index % 3]
    check(head, small(FAMILIES[family]))


@pytest.mark.slow
@pytest.mark.parametrize("head", DETECTORS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_detector_on_every_family(family: str, head: str) -> None:
    check(head, small(FAMILIES[family]))


@pytest.mark.parametrize("attention", ["focused", "hydra"])
def test_other_attentions(attention: str) -> None:
    check("mask_rcnn", small("swin_tiny"), attention=attention)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["retinanet", "mask_rcnn"])
@torch.no_grad()
def test_images_of_the_usual_size(head: str) -> None:
    torch.manual_seed(0)
    model = linvit.create_detector("pvt_v2_b0", head, num_classes=80).eval()
    (found,) = model([torch.randn(3, 800, 1333)], sizes=[(480, 800)])
    assert found["boxes"].shape[1] == 4
