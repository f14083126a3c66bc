"""Encoding of boxes relative to other boxes, and non-maximum suppression.

Paper: Girshick et al. 2014, "Rich feature hierarchies for accurate object detection and semantic segmentation", App. C.

Results of a batch are tensors whose sizes do not depend on the images, for exported programs: nothing is removed,
but missing entries have the score `DROPPED`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.ops import batched_nms, box_convert, nms

from linvit.attention.ops.functional import is_exporting, upcast
from linvit.errors import check_number
from linvit.heads.detection.base import constants

DROPPED = -1e30
"""Score below all scores and logits."""
LARGEST = math.log(1000 / 16)
"""Maximum absolute logarithm of a quotient of sides: a box of 16 pixels becomes at most one of 1000."""
ONE_PLANE = 25_000
"""Maximum number of boxes that a GPU compares all with all."""
EPSILON = 1e-7
"""Keeps divisors for boxes without an area from being 0."""


@dataclass(frozen=True)
class BoxCoder:
    """Boxes as offsets of the centre and logarithms of the sides, each over a standard deviation.

    Encoding equals that of torchvision's `BoxCoder` with the reciprocals as weights. Decoding differs: torchvision
    bounds the logarithms only from above; mmdetection and this class bound them on both sides.
    """

    stds: Sequence[float] = (1.0, 1.0, 1.0, 1.0)

    def encode(self, boxes: Tensor, targets: Tensor) -> Tensor:
        """Returns the deltas (n, 4) from boxes (n, 4) to targets (n, 4)."""
        centre, size = _centre_and_size(boxes)
        target_centre, target_size = _centre_and_size(targets)
        deltas = torch.cat([(target_centre - centre) / size, (target_size / size).log()], 1)
        return deltas / constants(self.stds, deltas)

    def decode(self, boxes: Tensor, deltas: Tensor) -> Tensor:
        """Returns the boxes (..., 4) that result from boxes (..., 4) and deltas (..., 4), in float32 or more."""
        deltas = upcast(deltas)
        deltas = deltas * constants(self.stds, deltas)
        centre, size = _centre_and_size(boxes)
        centre = centre + size * deltas[..., :2]
        half = size * deltas[..., 2:].clamp(-LARGEST, LARGEST).exp() / 2
        return torch.cat([centre - half, centre + half], -1)


def generalized_iou(boxes: Tensor, others: Tensor) -> Tensor:
    """Returns the generalised IoU (n,) of each of boxes (n, 4) and its counterpart (Rezatofighi et al. 2019, Alg. 1).

    It equals 1 minus torchvision's `generalized_box_iou_loss`, which synchronises host and device ten times per step.
    """
    overlap = _area(boxes[:, :2].maximum(others[:, :2]), boxes[:, 2:].minimum(others[:, 2:]))
    hull = _area(boxes[:, :2].minimum(others[:, :2]), boxes[:, 2:].maximum(others[:, 2:]))
    union = _area(*boxes.split(2, 1)) + _area(*others.split(2, 1)) - overlap
    return overlap / (union + EPSILON) - (hull - union) / (hull + EPSILON)


def _area(start: Tensor, end: Tensor) -> Tensor:
    """Returns the area (n,) between corners (n, 2); 0 for empty boxes."""
    width, height = (end - start).clamp(min=0).unbind(1)  # the gradient of `prod` would synchronise host and device
    return width * height


def _centre_and_size(boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Returns centres (..., 2) and sides (..., 2) of boxes (..., 4)."""
    centre, size = box_convert(upcast(boxes), "xyxy", "cxcywh").split(2, -1)
    return centre, size


def check_limits(score_threshold: float, nms_threshold: float, max_detections: int) -> None:
    """Raises a `UserError` if these options of heads are out of range."""
    check_number("score_threshold", score_threshold, at_least=0, below=1)
    check_number("nms_threshold", nms_threshold, at_least=0, at_most=1)
    check_number("max_detections", max_detections, at_least=1, whole=True)


def has_area(boxes: Tensor) -> Tensor:
    """Returns a mask (...) of the boxes (..., 4) that have an area."""
    return (boxes[..., 2:] > boxes[..., :2]).all(-1)


def best_of_batch(boxes: Tensor, scores: Tensor, iou: float, limit: int, cut: bool = True) -> dict[str, Tensor]:
    """Returns the best detections of each image; of detections of one class with an IoU above `iou`, the best is kept.

    Args:
        boxes: (B, n, 4), or one per class (B, n, K, 4).
        scores: (B, n, K), `DROPPED` for missing entries.
        iou: Intersection over union.
        limit: Maximum number of detections per image.
        cut: Outside exported programs, cut the results to the largest number of detections, which needs a
            host-device synchronisation. If False, a box may have a score of at most one class.

    Returns:
        `num_detections` (B,), on the CPU if they are cut, and, padded with zeros, `boxes` (B, limit, 4),
        `labels` and `scores` (B, limit).
    """
    count, classes = scores.shape[1:]
    by_class, of_class = scores.mT, boxes  # (B, K, n), (B, n, 4)
    if boxes.ndim == 4:  # treat each class of an image as a separate image
        by_class, of_class = by_class.flatten(0, 1)[:, None], boxes.transpose(1, 2).flatten(0, 1)
    kept, number = suppress(of_class, by_class, iou, limit, cut)
    best, place = top_of_batch(kept.reshape(scores.shape[0], -1), limit)
    counts = (best > DROPPED).sum(1)
    if cut and not is_exporting():
        counts = torch.tensor([min(number, limit)]) if len(scores) == 1 else counts.cpu()
        most = max(1, int(counts.max()))
        best, place = best[:, :most], place[:, :most]
    row, label = place % count, place // count
    index = row if boxes.ndim == 3 else row * classes + label
    found = best > DROPPED
    return {
        "num_detections": counts,
        "boxes": gather_rows(boxes if boxes.ndim == 3 else boxes.flatten(1, 2), index).where(found[..., None], 0),
        "labels": label.where(found, 0),
        "scores": best.where(found, 0),
    }


def top_of_batch(scores: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """Returns the greatest of scores (B, n) and their positions, both (B, limit); beyond n `DROPPED` and 0."""
    best, place = F.pad(scores, (0, limit), value=DROPPED).topk(limit)
    return best, place.where(best > DROPPED, 0)


def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Returns for each image the entries (B, k, d) of x (B, n, d) at rows (B, k)."""
    return x.gather(1, rows[..., None].expand(-1, -1, x.shape[2]))


def suppress(boxes: Tensor, scores: Tensor, iou: float, limit: int, cut: bool = True) -> tuple[Tensor, int]:
    """Returns the scores, `DROPPED` for a box (G, n, 4) whose IoU with a better one of its class is above `iou`.

    Scores are (G, K, n). In an ONNX file this is one NonMaxSuppression for all images and classes, which keeps at most
    `limit` of each; in a program of torch.export one torchvision::nms with all boxes in one plane. The same is used
    on a GPU, where torchvision's `batched_nms` synchronises; too many boxes are processed image by image. The number
    of kept boxes is also returned, if the scores are to be `cut` to them and the program is not exported.
    """
    if torch.onnx.is_in_onnx_export():
        return _in_onnx(boxes, scores, iou, limit), 0
    if not cut:
        scores = scores.where(scores > DROPPED, DROPPED)  # NaN would otherwise be the best
    place = _kept(boxes, scores, iou, cut or is_exporting())
    return _only(scores, place), place[0].shape[0]


def _only(scores: Tensor, place: tuple[Tensor, ...]) -> Tensor:
    return torch.full_like(scores, DROPPED).index_put(place, scores[place])


def _kept(boxes: Tensor, scores: Tensor, iou: float, cut: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Returns group, class and row of kept boxes; without a cut, some several times, or `DROPPED` ones."""
    there = scores > DROPPED
    place = there.nonzero() if cut else there.nonzero_static(size=boxes[..., 0].numel(), fill_value=0)
    if not is_exporting() and len(place) > ONE_PLANE and len(scores) > 1:
        each = [_kept(boxes[i : i + 1], scores[i : i + 1], iou, cut) for i in range(len(scores))]
        groups = torch.cat([group + i for i, (group, _, _) in enumerate(each)])
        labels, rows = (torch.cat([one[j] for one in each]) for j in (1, 2))
        return groups, labels, rows
    group, label, row = place.unbind(1)
    box, score = boxes[group, row].double(), scores[group, label, row]  # in float32 distant positions are too coarse
    kind = group * scores.shape[1] + label
    if is_exporting() or (box.is_cuda and len(box) <= ONE_PLANE):
        kept = nms(box + (kind * (F.pad(box, (0, 0, 0, 1)).amax() + 1))[:, None], score.double(), iou)
    else:
        kept = batched_nms(box, score.double(), kind, iou)
    return group[kept], label[kept], row[kept]


def _suppress(boxes: Tensor, scores: Tensor, iou: float, limit: int) -> Tensor:
    return _only(scores, _kept(boxes, scores, iou, True))


_in_onnx = torch.library.custom_op("linvit::suppress", _suppress, mutates_args=())
_in_onnx.register_fake(lambda boxes, scores, iou, limit: torch.empty_like(scores))


def onnx_translations() -> dict[Any, Any]:
    """Returns the ONNX translations of these operators, for `torch.onnx.export(custom_translation_table=...)`."""
    from onnxscript import opset20

    op: Any = opset20

    def translate(boxes: Any, scores: Any, iou: float, limit: int) -> Any:
        kept = op.NonMaxSuppression(boxes, scores, limit, iou, DROPPED / 2)
        return op.ScatterND(op.Expand(DROPPED, op.Shape(scores)), kept, op.GatherND(scores, kept))

    return {torch.ops.linvit.suppress.default: translate}
