"""`torch.compile` takes a network and its loss as one graph, and does not compile again in the second step."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import linvit
from linvit.tasks.segmentation.task import SegmentationTask
from tests.families import narrow, small
from tests.helpers import own_names
from tests.training import CLASSES, SIDE, tiny_task

IMAGES = torch.ones(2, 3, SIDE, SIDE)
QUICK = ("focused", "taylor")  # the quickstarts'


def graphs(step: Callable[[Tensor], Tensor], images: Tensor) -> tuple[int, int]:
    """How many graphs two steps are, and at how many places these break off."""
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(step, backend="eager")
    for given in (images, images + 1):
        compiled(given)
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.mark.parametrize(
    "attention",
    [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
        for name in own_names(linvit.registry.attentions)
    ],
)
def test_classification(attention: str) -> None:
    task = tiny_task(attention=attention).train()
    label = torch.zeros(len(IMAGES), dtype=torch.long)
    assert graphs(lambda images: task.training_loss({"image": images, "label": label}), IMAGES) == (1, 0)


BIG = IMAGES.repeat(1, 1, 64 // SIDE, 64 // SIDE)


@pytest.mark.parametrize("attention", ["linear", pytest.param("focused", marks=pytest.mark.slow)])
def test_segmentation(attention: str) -> None:
    options = {"backbone": small("pvt_v2_b0"), "head": narrow("semantic_fpn"), "attention": attention}
    task = SegmentationTask(**options, num_classes=CLASSES, img_size=64).train()
    mask = torch.zeros(len(BIG), 64, 64, dtype=torch.long)
    assert graphs(lambda images: task.training_loss({"image": images, "mask": mask}), BIG) == (1, 0)


def test_detection() -> None:
    """What `compile` takes of a detector; what its heads find decides the sizes of what follows."""
    detector = linvit.create_detector(small("pvt_v2_b0"), narrow("retinanet"), CLASSES, "linear", 64).train()
    maps = partial(detector._feature_maps, detector.backbone, indices=detector.pyramid.indices)
    assert graphs(lambda images: sum(x.sum() for x in maps(images)), BIG) == (1, 0)
