"""COCO's evaluation, by faster-coco-eval, which agrees with pycocotools in all figures."""

import contextlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from linvit import coco_masks
from linvit.errors import UserError

FIGURES = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")
"""COCO's twelve, in its order: precision over IoU 0.50:0.95, at 0.5 and 0.75, of small, medium and large objects;
recall with 1, 10 and 100 detections per image and class, and of small, medium and large objects."""


@dataclass(frozen=True)
class Evaluation:
    """What COCO's evaluation says of a set.

    Attributes:
        figures: Those of `FIGURES` (12,), in [0, 1]; -1 where there is no object to find.
        precision: By IoU threshold (0.50, 0.55, ..., 0.95), recall (0, 0.01, ..., 1) and class, (10, 101, K), of
            objects of all sizes and 100 detections; -1 for a class without an object.
    """

    figures: np.ndarray
    precision: np.ndarray

    def class_scores(self) -> dict[str, np.ndarray]:
        """AP, AP50 and AP75 of each class (K,); NaN for a class without an object."""
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
    """A detection as COCO's `loadRes` makes it, which takes the area from the box if there is one."""
    if kind == "mask" and area_from == "mask":
        area = int(coco_masks.area([given["segmentation"]])[0])
    else:
        area = given["bbox"][2] * given["bbox"][3]
    return {**given, "id": number, "area": area, "iscrowd": 0}


def tools() -> tuple[Any, Any]:
    """The classes COCO and COCOeval."""
    try:
        from faster_coco_eval import COCO, COCOeval_faster
    except ImportError as error:
        raise UserError(
            "COCO's average precision needs the package 'faster-coco-eval': pip install 'linvit[detection]'"
        ) from error
    return COCO, COCOeval_faster
