"""Non-maximum suppression: of detections that overlap, the best one stays."""

import torch
from torch import Tensor
from torchvision.ops import batched_nms

from linvit.errors import check_number
from linvit.heads.detection.base import Detections


def check_limits(score_threshold: float, nms_threshold: float, max_detections: int) -> None:
    """Raises a `UserError` unless these options of heads are as they must be."""
    check_number("score_threshold", score_threshold, at_least=0, below=1)
    check_number("nms_threshold", nms_threshold, at_least=0, at_most=1)
    check_number("max_detections", max_detections, at_least=1, whole=True)


def best(boxes: Tensor, scores: Tensor, labels: Tensor, iou: float, limit: int) -> Detections:
    """Returns the best detections, at most `limit`: of those of one class with an IoU above `iou`, the best stays."""
    keep = batched_nms(boxes, scores, labels, iou)[:limit]
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
    """Returns which of boxes (n, 4) have an area, (n,)."""
    return (boxes[:, 2:] > boxes[:, :2]).all(1)
