"""True and detected objects of a set from all ranks; rank 0 evaluates them by faster-coco-eval, as pycocotools."""

import contextlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from torch import Tensor, distributed

from linvit.callbacks.common import gather
from linvit.callbacks.save_checkpoints import on_cpu
from linvit.errors import UserError
from linvit.io import coco_masks

FIGURES = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")
"""COCO's twelve, in its order: precision over IoU 0.50:0.95, at 0.5 and 0.75, of small, medium and large objects;
recall with 1, 10 and 100 detections per image and class, and of small, medium and large objects."""


@dataclass(frozen=True)
class Evaluation:
    """Result of COCO's evaluation of a dataset; -1 where there is no object to find."""

    figures: np.ndarray  # those of `FIGURES` (12,), in [0, 1]
    # (10, 101, K): by IoU threshold (0.50, 0.55, ..., 0.95), recall (0, 0.01, ..., 1) and class, of objects of all
    # sizes and 100 detections
    precision: np.ndarray

    def class_scores(self) -> dict[str, np.ndarray]:
        """Returns AP, AP50 and AP75 of each class (K,); NaN for a class without an object."""
        precision = np.where(self.precision < 0, np.nan, self.precision).mean(1)  # (10, K)
        return {"AP": precision.mean(0), "AP50": precision[0], "AP75": precision[5]}


def evaluate(
    truth: Mapping[str, Any],
    detections: Sequence[Mapping[str, Any]],
    kind: Literal["box", "mask"],
    area_from: Literal["box", "mask"] = "box",
) -> Evaluation:
    """Evaluates detections against the truth."""
    coco, evaluation = tools()
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints
        found = [_annotation(i, given, kind, area_from) for i, given in enumerate(detections, 1)]
        sets = [coco(), coco()]
        for made, annotations in zip(sets, (truth["annotations"], found), strict=True):
            made.dataset = {**truth, "annotations": annotations}
            made.createIndex()
        run = evaluation(*sets, iouType={"box": "bbox", "mask": "segm"}[kind])
        run.evaluate()
        run.accumulate()
        run.summarize()
    return Evaluation(np.array(run.stats[: len(FIGURES)]), np.array(run.eval["precision"][..., 0, -1]))


def _annotation(number: int, given: Mapping[str, Any], kind: str, area_from: str) -> dict[str, Any]:
    """Returns a detection as COCO's `loadRes` makes it: its area is that of the box, if it has one."""
    if kind == "mask" and area_from == "mask":
        area = int(coco_masks.area([given["segmentation"]])[0])
    else:
        area = given["bbox"][2] * given["bbox"][3]
    return {**given, "id": number, "area": area, "iscrowd": 0}


def tools() -> tuple[Any, Any]:
    """Returns the classes COCO and COCOeval."""
    try:
        from faster_coco_eval import COCO, COCOeval_faster
    except ImportError as error:
        raise UserError(
            "COCO's average precision needs the package 'faster-coco-eval': pip install 'linvit[detection]'"
        ) from error
    return COCO, COCOeval_faster


class Objects(NamedTuple):
    """True or detected objects of an image, in pixels of the original. 100 with masks take some 50 kB."""

    size: tuple[int, int]  # (H, W) of the original
    boxes: np.ndarray  # (n, 4): x1, y1, x2, y2
    labels: np.ndarray  # classes (n,), int64
    counts: list[str | bytes] | None = None  # of n run-length encoded masks, where there are masks
    scores: np.ndarray | None = None  # (n,), of detected objects
    iscrowd: np.ndarray | None = None  # (n,), bool, of true objects: a crowd, which nothing needs to find
    area: np.ndarray | None = None  # (n,), of true objects, as their annotations say it

    @classmethod
    def of_truth(cls, batch: Mapping[str, Any], i: int) -> Self:
        """Returns the true objects of an image of an evaluation batch."""
        rles = batch["rles"][i] if batch.get("rles") is not None else None
        numbers = {name: batch[name][i].cpu().numpy() for name in ("boxes", "labels", "iscrowd", "area")}
        return cls(image_size(batch, i), counts=_counts(rles), **numbers)

    @classmethod
    def of_detections(cls, found: Mapping[str, Tensor], size: tuple[int, int]) -> Self:
        """Converts the detections of an image; encodes its masks."""
        here = on_cpu(dict(found))  # the host waits once for all of them
        rles = coco_masks.encode(here["masks"].numpy()) if "masks" in here else None
        boxes, scores = (here[name].float().numpy() for name in ("boxes", "scores"))
        return cls(size, boxes, here["labels"].numpy(), _counts(rles), scores)

    def above(self, threshold: float) -> "Objects":
        """Returns detected objects with scores of at least a threshold."""
        if not threshold or self.scores is None:
            return self
        kept = self.scores >= threshold
        counts = self.counts and [count for count, own in zip(self.counts, kept, strict=True) if own]
        return self._replace(boxes=self.boxes[kept], labels=self.labels[kept], scores=self.scores[kept], counts=counts)

    @property
    def rles(self) -> list[dict[str, Any]]:
        """The masks as COCO's RLEs."""
        return [{"size": list(self.size), "counts": counts} for counts in self.counts or []]

    def annotations(self, image: int, categories: Sequence[int]) -> list[dict[str, Any]]:
        """Returns the objects as COCO's JSON has them: boxes are x, y, width and height."""
        boxes = self.boxes.astype(np.float64)
        boxes[:, 2:] -= boxes[:, :2]
        columns: dict[str, Sequence[Any]] = {"bbox": boxes.tolist()}
        columns["category_id"] = [categories[label] for label in self.labels.tolist()]
        if self.counts is not None:
            columns["segmentation"] = self.rles
        if self.scores is not None:
            columns["score"] = self.scores.tolist()
        if self.iscrowd is not None and self.area is not None:
            columns |= {"iscrowd": self.iscrowd.astype(int).tolist(), "area": self.area.tolist()}
        rows = zip(*columns.values(), strict=True)
        return [{"image_id": image, **dict(zip(columns, row, strict=True))} for row in rows]


def image_size(batch: Mapping[str, Any], i: int) -> tuple[int, int]:
    """(H, W) of the original of an image of a batch."""
    height, width = batch["size"][i]
    return int(height), int(width)


def _counts(rles: Sequence[Mapping[str, Any]] | None) -> list[str | bytes] | None:
    return None if rles is None else [rle["counts"] for rle in rles]


Kind = Literal["box", "mask"]


class DetectionResults:
    """True and detected objects of the images of a set, and COCO's figures of them.

    torchmetrics' `MeanAveragePrecision` is not used: its thresholds are float32 numbers, which changes the AP.
    """

    def __init__(self, num_classes: int, kinds: Sequence[Kind], area_from: Literal["box", "mask"]) -> None:
        self.num_classes = num_classes
        self.kinds = kinds
        self.area_from = area_from
        self.reset()

    def reset(self) -> None:
        """Forgets everything."""
        self._images: dict[int, tuple[Objects, Objects]] = {}
        self._figures: dict[str, float] | None = None
        self.evaluations: dict[Kind, Evaluation] = {}
        self.objects = np.zeros(self.num_classes, dtype=np.int64)

    def update(self, index: int, true: Objects, detected: Objects) -> None:
        """Adds an image by its number in the set. An image that comes twice counts once."""
        self._images[index] = true, detected
        self._figures = None

    def figures(self) -> dict[str, float]:
        """Returns the figures by name, such as "box_AP" and "mask_AP50", on all ranks; every rank must call it."""
        if self._figures is None:
            if (parts := gather(self._images)) is not None:
                found = {index: image for part in parts for index, image in part.items()}
                self._evaluate({index: found[index] for index in sorted(found)})
            found = {
                f"{kind}_{name}": figure
                for kind, evaluation in self.evaluations.items()
                for name, figure in zip(FIGURES, evaluation.figures.tolist(), strict=True)
            }
            told = [found]
            if distributed.is_available() and distributed.is_initialized():
                distributed.broadcast_object_list(told)
            self._figures = told[0]
        return self._figures

    def _evaluate(self, images: Mapping[int, tuple[Objects, Objects]]) -> None:
        classes = range(self.num_classes)
        pairs = images.items()
        true, detected = ([one for i, pair in pairs for one in pair[k].annotations(i, classes)] for k in (0, 1))
        for number, annotation in enumerate(true, 1):  # COCO's evaluation takes 0 for no match
            annotation["id"] = number
        sizes = {i: pair[0].size for i, pair in pairs}
        truth = {
            "images": [{"id": i, "height": height, "width": width} for i, (height, width) in sizes.items()],
            "categories": [{"id": label, "name": str(label)} for label in classes],
            "annotations": true,
        }
        for kind in self.kinds:
            self.evaluations[kind] = evaluate(truth, detected, kind, self.area_from)
        labels = [one["category_id"] for one in true if not one["iscrowd"]]
        self.objects = np.bincount(np.array(labels, dtype=np.int64), minlength=self.num_classes)
