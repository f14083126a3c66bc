"""Object detection and instance segmentation: boxes, their classes, and masks."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_warn
from PIL import Image
from torch import Tensor, nn
from torchmetrics import Metric

from linvit.callbacks.dense import DetectionPictures, curves_picture, draw, enlarged
from linvit.callbacks.report import Findings, Report, write_picture
from linvit.errors import UserError, check_number
from linvit.heads.detection.detector import create_detector
from linvit.io import coco_masks
from linvit.io.files import write_text
from linvit.tasks.base import Task
from linvit.tasks.detection.evaluation import FIGURES, DetectionResults, Kind, Objects, image_size, tools
from linvit.tasks.execution import SharedScore
from linvit.tasks.published import PublishedScores, published_ap
from linvit.tasks.results import Result

WIDTH = (480, 1600)  # pixels of a picture
DRAWN = 0.3  # the least score of an object in a picture


@dataclass(kw_only=True)
class DetectionResult(Result):
    """The objects in an image, in its pixels, the surest first.

    Attributes:
        objects: Boxes, classes, scores and masks as arrays.
    """

    objects: Objects

    @property
    def boxes(self) -> np.ndarray:
        """Boxes (n, 4): x1, y1, x2, y2."""
        return self.objects.boxes

    @property
    def labels(self) -> list[str]:
        """Names of their classes."""
        return [self.class_names[index] for index in self.objects.labels.tolist()]

    @property
    def scores(self) -> list[float]:
        """Confidence of each detection, 0 to 1."""
        return [] if self.objects.scores is None else self.objects.scores.tolist()

    @property
    def masks(self) -> np.ndarray | None:
        """Masks of the objects (n, H, W), bool; None if the detector has no masks."""
        if self.objects.counts is None:
            return None
        return coco_masks.decode(self.objects.rles).astype(bool).reshape(-1, *self.objects.size)

    def plot(self, threshold: float = DRAWN) -> Image.Image:
        """Returns the image with the objects of at least this score."""
        picture = self.image
        draw(picture, self.objects, self.palette, self.class_names, threshold)
        return picture

    def save(self, path: str | Path) -> Path:
        """Writes `path` as JSON, a list in COCO's format of results; see `save_all`."""
        ids = self.category_ids or range(1, len(self.class_names) + 1)
        write_text(Path(path), json.dumps(self.objects.annotations(1, ids)))
        return Path(path)

    def write(self, target: Path, number: int) -> tuple[int, str, Objects]:
        """Writes `NAME.jpg` with the objects, small images enlarged."""
        target.parent.mkdir(parents=True, exist_ok=True)
        picture = enlarged(self.image, *WIDTH)
        draw(picture, self.objects, self.palette, self.class_names, DRAWN)
        write_picture(target.with_name(f"{target.name}.jpg"), picture, durable=False, quality=92)
        return number, self.name, self.objects

    @classmethod
    def write_set(
        cls, rows: Sequence[Any], path: Path, class_names: Sequence[str], ids: Sequence[int] | None = None
    ) -> Path:
        """Writes `results.json` and `images.json`.

        The first is a list of objects in COCO's format, in pixels of the original images: `image_id`, `category_id`,
        `bbox` (x, y, width, height), `score` and, with masks, `segmentation` (an RLE). The second says which image and
        which class has which id; COCO's tools read it as annotations, and then the results.
        """
        if ids is None:
            rank_zero_warn(
                f"COCO's ids of the classes are not known: '{path / 'results.json'}' counts them from 1, as "
                f"'{path / 'images.json'}' says"
            )
        ids = ids or range(1, len(class_names) + 1)
        images = [
            {"id": number, "file_name": name, "height": objects.size[0], "width": objects.size[1]}
            for number, name, objects in rows
        ]
        categories = [{"id": number, "name": name} for number, name in zip(ids, class_names, strict=True)]
        results = [one for number, _, objects in rows for one in objects.annotations(number, ids)]
        content = {"results": results, "images": {"images": images, "annotations": [], "categories": categories}}
        for name, value in content.items():
            write_text(path / f"{name}.json", json.dumps(value))
        return path


class DetectionTask(Task):
    """Trains on the sum of a detector's losses and logs each; `val/score` is COCO's average precision of boxes.

    COCO's twelve figures of boxes are logged, and of masks if the head predicts them, such as `val/box_AP`,
    `val/mask_AP50`; -1 where the set has no object of that size. They are those of the whole set at the size of the
    originals, computed once, on rank 0, and do not depend on how many ranks there are: images are evaluated one by one.

    Args:
        head: Name, or `{name: ..., option: value}`. See `linvit list heads`.
        area_from: The area by which detected masks are small, medium or large in mask_APs, mask_APm and mask_APl: their
            "box", as in mmdetection before 2.12, which the papers' tables used, or the "mask" itself.
        **task: Arguments of `Task`: backbone, attention, optimisation.

    Example:
        $ linvit fit --config detection_quickstart --model.attention=focused
    """

    score_metric = "box_AP"
    advanced_options = Task.advanced_options | {"area_from"}

    def __init__(
        self,
        head: str | dict[str, Any] = "retinanet",
        area_from: Literal["box", "mask"] = "box",
        **task: Any,
    ) -> None:
        super().__init__(**task)

    def configure_network(self) -> nn.Module:
        """Returns the detector: maps a list of images to a list of detections, as mappings; with targets, to losses."""
        names = ("backbone", "head", "num_classes", "attention", "img_size", "in_chans", "drop_path_rate")
        return create_detector(**{name: self.hparams[name] for name in names})

    def measurable_network(self) -> nn.Module:
        """Returns the detector with one object per image in training, whose output is then the sum of its losses."""
        return _WithTruth(self.network)

    def configure_metrics(self) -> Mapping[str, Metric]:
        """Returns COCO's metrics."""
        kinds: list[Kind] = ["box", "mask"] if self.network.with_masks else ["box"]
        settings = self.hparams
        results = DetectionResults(settings["num_classes"], kinds, settings["area_from"])
        names = [f"{kind}_{name}" for kind in kinds for name in FIGURES]
        return {name: SharedScore(results, name) for name in names}

    def setup(self, stage: str) -> None:
        """Raises a `UserError` before the first batch if the package that evaluates is not installed."""
        super().setup(stage)
        if stage != "predict":
            tools()

    def forward(self, images: Tensor | Sequence[Tensor]) -> Any:
        """Maps images, each (3, H, W), to mappings of detections, by the weights that `Task.forward` uses."""
        return super().forward(list(images))  # type: ignore[arg-type]

    def training_loss(self, batch: dict[str, Any]) -> Tensor:
        """Returns the sum of the losses."""
        self._check_masks(batch, "masks")
        names = ["boxes", "labels", *(["masks"] if self.network.with_masks else [])]
        rows = zip(*(batch[name] for name in names), strict=True)
        targets = [dict(zip(names, row, strict=True)) for row in rows]
        losses: dict[str, Tensor] = self.network(batch["image"], targets)
        self._losses = {f"train/{name}": loss.detach() for name, loss in losses.items()}
        total: Tensor = sum(losses.values())  # type: ignore[assignment]
        return total

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Returns and logs the sum of the losses, and logs each."""
        loss = super().training_step(batch, batch_idx)
        self.log_dict(self._losses)
        return loss

    def score_batch(
        self, network: nn.Module, batch: dict[str, Any], metrics: Mapping[str, Any]
    ) -> list[tuple[Objects, Objects]]:
        """Updates the figures; returns the true and the detected objects of each image."""
        self._check_masks(batch, "rles")
        found = [(Objects.of_truth(batch, i), self._detect(network, batch, i)) for i in range(len(batch["image"]))]
        for index, pair in zip(batch["index"].tolist(), found, strict=True):
            metrics[self.score_metric].state.update(index, *pair)
        for metric in metrics.values():
            metric.update()
        return found

    def predict_batch(self, network: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
        """Ids (B), and the objects that are detected in each image, at its original size."""
        return {"id": batch["id"], "objects": [self._detect(network, batch, i) for i in range(len(batch["image"]))]}

    def image_results(self, predicted: dict[str, Any], threshold: float = 0.0) -> list[DetectionResult]:
        """Returns the objects of each image whose scores are at least `threshold`."""
        check_number("threshold", threshold, at_least=0, at_most=1)
        return [DetectionResult(objects=found.above(threshold)) for found in predicted["objects"]]

    def run_callbacks(self) -> list[Callback]:
        """Adds a table of the classes, curves and pictures."""
        return [*super().run_callbacks(), Report(self.report_folder), DetectionPictures()]

    def published(self) -> PublishedScores | None:
        """Returns the published average precision on COCO."""
        return published_ap(self.hparams)

    def class_findings(self, stage: str) -> Findings:
        """Objects and average precision of each class of the set that was just evaluated, and curves, on rank 0."""
        metrics: Any = self.metrics[f"{stage}/" if self.average is None else f"{stage}/ema_"]
        results: DetectionResults = metrics[self.score_metric].state
        results.figures()
        found = results.evaluations
        each = {kind: one.class_scores() for kind, one in found.items()}
        scores = {f"{kind}_{name}": values for kind, own in each.items() for name, values in own.items()}
        picture = partial(curves_picture, {kind: one.precision for kind, one in found.items()})
        return Findings("objects", results.objects, scores, "precision_recall", picture)

    def _detect(self, network: nn.Module, batch: dict[str, Any], i: int) -> Objects:
        """Detects in one image of a batch, alone, since padding to the size of others would change borders."""
        size = image_size(batch, i)
        (found,) = network([batch["image"][i]], sizes=[size])
        return Objects.of_detections(found, size)

    def _check_masks(self, batch: dict[str, Any], name: str) -> None:
        if self.network.with_masks and batch.get(name) is None:
            raise UserError(
                f"the head {self.hparams['head']!r} predicts masks, and this data has none: set --data.masks=true if "
                f"its annotations have them, or else --model.head=faster_rcnn or retinanet"
            )


class _WithTruth(nn.Module):
    """A detector that has one object to find in each image when it trains."""

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, images: Tensor) -> Any:
        """Maps images (B, 3, H, W) to a number, or in evaluation mode to detections."""
        if not self.training:
            return self.detector(images)
        height, width = images.shape[-2:]
        target = {
            "boxes": images.new_tensor([[0, 0, width / 2, height / 2]]),
            "labels": torch.zeros(1, dtype=torch.long, device=images.device),
            "masks": images.new_ones(1, height, width),
        }
        return sum(self.detector(images, [target] * len(images)).values())
