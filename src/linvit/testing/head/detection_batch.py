"""The batch that heads of detection are tried with, and what is wrong with what they make of it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from linvit.heads.detection.base import Detections, Target
from linvit.testing.attention.inputs import normal
from linvit.testing.backbone.images import CLASSES, Size
from linvit.testing.head.network import HeadSubject
from linvit.testing.report import Finding, failed


def lively(subject: HeadSubject, seed: int = 0) -> Any:
    """Builds the network in evaluation mode with biases of 0 in its classifiers, so that it finds something."""
    model = subject.build(seed=seed)
    for layer in model.head.classifiers():
        if isinstance(bias := getattr(layer, "bias", None), Tensor):
            bias.data.zero_()
    return model


def two_images(subject: HeadSubject) -> list[Tensor]:
    """Returns two images of different sizes."""
    height, width = subject.size
    return [normal(3, height, width, seed=1), normal(3, max(1, height - 5), width + 7, seed=2)]


def target_of(image: Tensor, boxes: Tensor) -> Target:
    """Returns a target of an image, with masks that fill the boxes."""
    masks = torch.zeros(len(boxes), *image.shape[-2:], dtype=torch.uint8)
    for mask, (x1, y1, x2, y2) in zip(masks, boxes.int().tolist(), strict=True):
        mask[max(0, y1) : max(0, y2), max(0, x1) : max(0, x2)] = 1
    return {"boxes": boxes, "labels": torch.arange(len(boxes)) % CLASSES, "masks": masks}


def two_targets(subject: HeadSubject) -> list[Target]:
    """Returns the truth of `two_images`: four boxes in the first, none in the second."""
    first, second = two_images(subject)
    sides = torch.tensor([first.shape[-1], first.shape[-2]] * 2)
    boxes = torch.tensor([[0.1, 0.1, 0.5, 0.6], [0.4, 0.3, 0.9, 0.8], [0.0, 0.0, 1.0, 1.0], [0.7, 0.1, 0.95, 0.4]])
    return [target_of(first, boxes * sides), target_of(second, boxes[:0])]


def losses_of(model: Any, images: list[Tensor], targets: Sequence[Target], backward: bool = False) -> dict[str, Tensor]:
    """Returns the losses in training mode, after their backward pass if that is asked for."""
    found: dict[str, Tensor] = model.train()(images, targets)
    if backward:
        sum(found.values(), torch.zeros(())).backward()
    return found


def not_finite(found: dict[str, Tensor]) -> Finding | None:
    """Returns the failure if there are no losses, or some are no finite scalars."""
    wrong = [name for name, value in found.items() if value.ndim or not value.isfinite()]
    if found and not wrong:
        return None
    return failed(f"no finite scalar: {', '.join(wrong)}" if wrong else "no losses")


def mistake_in(found: Detections, size: Size, with_masks: bool) -> str:
    """Returns what is wrong with the detections in an image of a size; empty if nothing is."""
    boxes, scores, labels = (found[name] for name in ("boxes", "scores", "labels"))
    count = len(boxes)
    limit = boxes.new_tensor([size[1], size[0]] * 2)
    if tuple(boxes.shape) != (count, 4) or tuple(scores.shape) != (count,) or tuple(labels.shape) != (count,):
        return f"boxes {tuple(boxes.shape)}, scores {tuple(scores.shape)}, labels {tuple(labels.shape)}"
    if not ((boxes >= 0) & (boxes <= limit)).all():
        return "boxes outside the image"
    if not (boxes[:, 2:] >= boxes[:, :2]).all():
        return "boxes with x2 < x1 or y2 < y1"
    if not (scores.diff() <= 0).all() or not ((scores >= 0) & (scores <= 1)).all():
        return "scores that do not fall, or outside 0 to 1"
    if not ((labels >= 0) & (labels < CLASSES)).all():
        return f"labels outside 0 to {CLASSES - 1}"
    if with_masks and (found["masks"].dtype != torch.bool or tuple(found["masks"].shape) != (count, *size)):
        return f"masks {tuple(found['masks'].shape)} of {found['masks'].dtype} instead of {(count, *size)} of bool"
    return ""
