"""Boxes: how a network tells them relative to others, and the best of those that overlap.

Paper: Girshick et al. 2014, "Rich feature hierarchies for accurate object detection and semantic segmentation", App. C.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchvision.ops import box_convert

from linvit.attention.ops.functional import upcast
from linvit.errors import check_number
from linvit.heads.detection.base import Detections
from linvit.heads.detection.device import constants, nms_in_groups

LARGEST = math.log(1000 / 16)
"""The largest absolute logarithm of a quotient of sides: a box of 16 pixels becomes one of 1000 at most."""
EPSILON = 1e-7
"""Keeps divisors of boxes without an area from being 0."""


@dataclass(frozen=True)
class BoxCoder:
    """Boxes as offsets of the centre and logarithms of the sides, each over a standard deviation.

    Encoding equals that of torchvision's `BoxCoder` with the reciprocals for weights. Decoding does not, which bounds
    the logarithms from above alone; mmdetection, and so this one, bounds them on both sides.
    """

    stds: Sequence[float] = (1.0, 1.0, 1.0, 1.0)

    def encode(self, boxes: Tensor, targets: Tensor) -> Tensor:
        """Returns what leads from boxes (n, 4) to targets (n, 4), as (n, 4)."""
        centre, size = _centre_and_size(boxes)
        target_centre, target_size = _centre_and_size(targets)
        deltas = torch.cat([(target_centre - centre) / size, (target_size / size).log()], 1)
        return deltas / constants(self.stds, deltas)

    def decode(self, boxes: Tensor, deltas: Tensor) -> Tensor:
        """Returns the boxes (..., 4) to which deltas (..., 4) lead from boxes (..., 4), in float32 or more."""
        deltas = upcast(deltas)
        deltas = deltas * constants(self.stds, deltas)
        centre, size = _centre_and_size(boxes)
        centre = centre + size * deltas[..., :2]
        half = size * deltas[..., 2:].clamp(-LARGEST, LARGEST).exp() / 2
        return torch.cat([centre - half, centre + half], -1)


def generalized_iou(boxes: Tensor, others: Tensor) -> Tensor:
    """Returns the generalised IoU (n,) of each of boxes (n, 4) and its other (Rezatofighi et al. 2019, Alg. 1).

    It equals 1 less torchvision's `generalized_box_iou_loss`, for which the host waits ten times in a step of training.
    """
    overlap = _area(boxes[:, :2].maximum(others[:, :2]), boxes[:, 2:].minimum(others[:, 2:]))
    hull = _area(boxes[:, :2].minimum(others[:, :2]), boxes[:, 2:].maximum(others[:, 2:]))
    union = _area(*boxes.split(2, 1)) + _area(*others.split(2, 1)) - overlap
    return overlap / (union + EPSILON) - (hull - union) / (hull + EPSILON)


def _area(start: Tensor, end: Tensor) -> Tensor:
    """Returns the area (n,) between corners (n, 2), 0 where there is none."""
    width, height = (end - start).clamp(min=0).unbind(1)  # for the gradient of `prod` the host would wait
    return width * height


def _centre_and_size(boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Returns centres (..., 2) and sides (..., 2) of boxes (..., 4)."""
    centre, size = box_convert(upcast(boxes), "xyxy", "cxcywh").split(2, -1)
    return centre, size


def check_limits(score_threshold: float, nms_threshold: float, max_detections: int) -> None:
    """Raises a `UserError` unless these options of heads are as they must be."""
    check_number("score_threshold", score_threshold, at_least=0, below=1)
    check_number("nms_threshold", nms_threshold, at_least=0, at_most=1)
    check_number("max_detections", max_detections, at_least=1, whole=True)


def best(boxes: Tensor, scores: Tensor, labels: Tensor, iou: float, limit: int) -> Detections:
    """Returns the best detections, at most `limit`: of those of one class with an IoU above `iou`, the best stays."""
    keep = nms_in_groups(boxes, scores, labels, iou)[:limit]
    return {"boxes": boxes[keep], "labels": labels[keep], "scores": scores[keep]}


def multiclass_nms(boxes: Tensor, scores: Tensor, threshold: float, iou: float, limit: int) -> Detections:
    """Returns the `best` detections of the pairs of a box and a class with scores above a threshold.

    Boxes are (n, 4), or of each class (n, K, 4), scores (n, K), without background.
    """
    row, label = (scores > threshold).nonzero(as_tuple=True)
    chosen = boxes[row] if boxes.ndim == 2 else boxes[row, label]
    return best(chosen, scores[row, label], label, iou, limit)


def top(scores: Tensor, limit: int) -> Tensor:
    """Returns the positions of the greatest of scores (n,), at most so many; the greatest first."""
    return torch.topk(scores, min(limit, len(scores))).indices


def has_area(boxes: Tensor) -> Tensor:
    """Returns which of boxes (..., 4) have an area, (...)."""
    return (boxes[..., 2:] > boxes[..., :2]).all(-1)
