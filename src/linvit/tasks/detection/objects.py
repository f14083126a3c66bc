"""Objects of an image, as evaluation, pictures and files take them: numbers and run-length encoded masks."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from torch import Tensor

from linvit import coco_masks


class Objects(NamedTuple):
    """True or detected objects of an image, in pixels of the original. 100 with masks take some 50 kB.

    Attributes:
        size: (H, W) of the original image.
        boxes: (n, 4): x1, y1, x2, y2.
        labels: Classes (n,), int64.
        counts: The counts of n run-length encoded masks; None where there are no masks.
        scores: (n,), of detected objects.
        iscrowd: (n,), bool, of true objects: a crowd, which nothing needs to find.
        area: (n,), of true objects, as their annotations say it.
    """

    size: tuple[int, int]
    boxes: np.ndarray
    labels: np.ndarray
    counts: list[str | bytes] | None = None
    scores: np.ndarray | None = None
    iscrowd: np.ndarray | None = None
    area: np.ndarray | None = None

    @classmethod
    def of_truth(cls, batch: Mapping[str, Any], i: int) -> Self:
        """The true objects of an image of an evaluation batch."""
        rles = batch["rles"][i] if batch.get("rles") is not None else None
        numbers = {name: batch[name][i].cpu().numpy() for name in ("boxes", "labels", "iscrowd", "area")}
        return cls(image_size(batch, i), counts=_counts(rles), **numbers)

    @classmethod
    def of_detections(cls, found: Mapping[str, Tensor], size: tuple[int, int]) -> Self:
        """What a detector found in an image; its masks are encoded."""
        masks = found.get("masks")
        rles = None if masks is None else coco_masks.encode(masks.cpu().numpy())
        boxes, scores = (found[name].float().cpu().numpy() for name in ("boxes", "scores"))
        return cls(size, boxes, found["labels"].cpu().numpy(), _counts(rles), scores)

    @property
    def rles(self) -> list[dict[str, Any]]:
        """The masks as COCO's RLEs."""
        return [{"size": list(self.size), "counts": counts} for counts in self.counts or []]

    def annotations(self, image: int, categories: Sequence[int]) -> list[dict[str, Any]]:
        """The objects as COCO's JSON has them: boxes are x, y, width and height.

        Args:
            image: The id of the image.
            categories: The id of each class.
        """
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
