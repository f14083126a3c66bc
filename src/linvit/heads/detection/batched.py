"""Detection in a batch of images of one size by tensors whose sizes do not depend on the images, for exported programs.

Where `boxes.py` leaves boxes out, their scores become `DROPPED` here.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.ops import nms

DROPPED = -1e30
"""Less than any score or logit."""


def best_of_batch(boxes: Tensor, scores: Tensor, iou: float, limit: int) -> dict[str, Tensor]:
    """Returns the best detections of each image; of those of one class with an IoU above `iou`, the best stays.

    Args:
        boxes: (B, n, 4), or of each class (B, n, K, 4).
        scores: (B, n, K), `DROPPED` where there is none.
        iou: Intersection over union.
        limit: The most detections of an image.

    Returns:
        `num_detections` (B,) and, with zeros behind so many, `boxes` (B, limit, 4), `labels` and `scores` (B, limit).
    """
    count, classes = scores.shape[1:]
    by_class = scores.mT  # (B, K, n)
    if boxes.ndim == 3:
        kept = suppress(boxes, by_class, iou, limit).flatten(1)
    else:  # a class of an image is an image of its own
        kept = suppress(boxes.transpose(1, 2).flatten(0, 1), by_class.flatten(0, 1)[:, None], iou, limit)
        kept = kept.unflatten(0, (-1, classes)).flatten(1)
    best, place = top_of_batch(kept, limit)
    row, label = place % count, place // count
    index = row if boxes.ndim == 3 else row * classes + label
    found = best > DROPPED
    return {
        "num_detections": found.sum(1),
        "boxes": gather_rows(boxes if boxes.ndim == 3 else boxes.flatten(1, 2), index).where(found[..., None], 0),
        "labels": label.where(found, 0),
        "scores": best.where(found, 0),
    }


def top_of_batch(scores: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """Returns the greatest of scores (B, n) and where they are, both (B, limit); beyond n they are `DROPPED`, at 0."""
    best, place = F.pad(scores, (0, limit), value=DROPPED).topk(limit)
    return best, place.where(best > DROPPED, 0)


def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Returns of each image the entries (B, k, d) of x (B, n, d) at rows (B, k)."""
    return x.gather(1, rows[..., None].expand(-1, -1, x.shape[2]))


def suppress(boxes: Tensor, scores: Tensor, iou: float, limit: int) -> Tensor:
    """Returns the scores, `DROPPED` for a box (G, n, 4) whose IoU with a better one of its class is above `iou`.

    Scores are (G, K, n). In an ONNX file it is one NonMaxSuppression for all images and classes, which keeps at most
    `limit` of each; in a program of torch.export one torchvision::nms, all that is there being in one plane.
    """
    return (
        _in_onnx(boxes, scores, iou, limit) if torch.onnx.is_in_onnx_export() else _suppress(boxes, scores, iou, limit)
    )


def _suppress(boxes: Tensor, scores: Tensor, iou: float, limit: int) -> Tensor:
    group, label, row = (scores > DROPPED).nonzero(as_tuple=True)
    box, score = boxes[group, row].double(), scores[group, label, row]  # in float32 distant places are too coarse
    place = (group * scores.shape[1] + label) * (F.pad(box, (0, 0, 0, 1)).amax() + 1)
    kept = nms(box + place[:, None], score.double(), iou)
    return torch.full_like(scores, DROPPED).index_put((group[kept], label[kept], row[kept]), score[kept])


_in_onnx = torch.library.custom_op("linvit::suppress", _suppress, mutates_args=())
_in_onnx.register_fake(lambda boxes, scores, iou, limit: torch.empty_like(scores))


def onnx_translations() -> dict[Any, Any]:
    """What the operators here are in ONNX, for `torch.onnx.export(custom_translation_table=...)`."""
    from onnxscript import opset20

    op: Any = opset20

    def translate(boxes: Any, scores: Any, iou: float, limit: int) -> Any:
        kept = op.NonMaxSuppression(boxes, scores, limit, iou, DROPPED / 2)
        return op.ScatterND(op.Expand(DROPPED, op.Shape(scores)), kept, op.GatherND(scores, kept))

    return {torch.ops.linvit.suppress.default: translate}
