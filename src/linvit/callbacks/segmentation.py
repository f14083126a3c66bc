"""What a run of semantic segmentation shows: scores of the classes, pictures, predicted masks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from PIL import Image
from torch import Tensor

from linvit.callbacks.common import class_names, pixels
from linvit.callbacks.dense import ValidationPictures, legend, overlay, palette
from linvit.callbacks.report import Findings, Report, confusion_picture
from linvit.rasters import georeference, write_tiff


class SegmentationReport(Report):
    """Writes `val_classes.csv` (class, pixels, IoU, Acc, F1) and `val_confusion.png`; after a test, `test_...`.

    Both are of the weights that `predict_with` names. The task offers `class_table(stage)`: the confusion matrix, and
    scores of each class.
    """

    name = "confusion"

    def collect(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> Any:
        """The matrix and the scores, which all ranks have."""
        return cast("Any", pl_module).class_table(stage)

    def findings(self, found: Any, pl_module: LightningModule) -> Findings:
        """Pixels and scores of each class."""
        matrix, scores = found[0].cpu().numpy(), {name: values.cpu().numpy() for name, values in found[1].items()}
        label, predicted = np.nonzero(matrix)
        picture = confusion_picture(label, predicted, class_names(pl_module), matrix[label, predicted])
        return Findings("pixels", matrix.sum(1), scores, picture)


class SegmentationPictures(ValidationPictures):
    """Writes `val_segmentation.png`: rows of image, labels and prediction, and a legend of the classes.

    Args:
        images: Rows of the picture.
    """

    name, titles, width = "segmentation", ("image", "labels", "prediction"), 320

    def rows(
        self, trainer: Trainer, pl_module: LightningModule, batch: dict[str, Any], predicted: Any
    ) -> Iterator[np.ndarray]:
        """Lays labels and predictions over the images of a batch."""
        colours = palette(pl_module.hparams["num_classes"])
        for image, mask, classes in zip(batch["image"], batch["mask"], predicted, strict=True):
            picture = pixels(image, trainer)
            side = (self.width, max(round(self.width * picture.shape[0] / picture.shape[1]), 1))
            shown = np.asarray(Image.fromarray(picture).resize(side))
            maps = [np.asarray(_resized(found, side)) for found in (mask, classes)]
            yield np.concatenate([shown, *(overlay(shown, found, colours) for found in maps)], 1)

    def below(self, trainer: Trainer, pl_module: LightningModule) -> list[np.ndarray]:
        """The legend."""
        colours = palette(pl_module.hparams["num_classes"])
        return [np.asarray(legend(colours, class_names(pl_module), len(self.titles) * self.width))]


def _resized(classes: Tensor, side: tuple[int, int]) -> Image.Image:
    whole = Image.fromarray(classes.to(torch.int32).cpu().numpy(), mode="I")
    return whole.resize(side, Image.Resampling.NEAREST)


def write_mask(target: Path, classes: np.ndarray, colours: np.ndarray, image: str) -> Path:
    """Writes classes (H, W) as PNG or, of a GeoTIFF, as one; returns the path, which is `target` with an ending."""
    kind = np.uint8 if len(colours) <= 256 else np.uint16
    place, saved = georeference(image), classes.astype(kind)
    path = target.with_name(f"{target.name}.{'png' if place is None else 'tif'}")
    if place is None:
        Image.fromarray(saved).save(path)
    else:
        write_tiff(path, saved[None], place, colours.tolist() if kind is np.uint8 else ())
    return path
