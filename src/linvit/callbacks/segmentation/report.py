"""The scores of each class as a table, and the confusion matrix of pixels as a picture."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from PIL import Image

from linvit.callbacks.class_names import class_names
from linvit.callbacks.report import Report, write_picture, write_table
from linvit.callbacks.tensorboard import add_picture


class SegmentationReport(Report):
    """Writes `val_classes.csv` (class, pixels, IoU, Acc, F1) and `val_confusion.png`; after a test, `test_...`.

    Training reports each validation, and writes the picture to TensorBoard, too. Both are of the weights that
    `predict_with` names. The task offers `class_table(stage)`: the confusion matrix, and scores of each class.

    Args:
        folder: Where to write; null is the folder of the logger, and nothing is written without one.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        super().__init__(folder)
        self._last: tuple[torch.Tensor, dict[str, torch.Tensor]] | None = None

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keeps the matrix before the task empties it."""
        self._last = cast("Any", pl_module).class_table("val")

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keeps the matrix before the task empties it."""
        self._last = cast("Any", pl_module).class_table("test")

    def collect(self, trainer: Trainer) -> tuple[torch.Tensor, dict[str, torch.Tensor]] | None:
        """The matrix and the scores of the last set, which all ranks have."""
        return self._last

    def write(self, found: Any, trainer: Trainer, pl_module: LightningModule, folder: Path, stage: str) -> str:
        """Writes the table and the picture."""
        from linvit.callbacks.confusion_picture import matrix_picture  # here, since matplotlib takes half a second

        matrix, scores = found[0].cpu().numpy(), {name: values.cpu() for name, values in found[1].items()}
        names = class_names(pl_module)
        rows: list[list[Any]] = [["class", "pixels", *scores]]
        for i, (name, pixels) in enumerate(zip(names, matrix.sum(1), strict=True)):
            values = [values[i].item() for values in scores.values()]
            rows.append([name, pixels, *("" if np.isnan(value) else f"{value:.6f}" for value in values)])
        table = folder / f"{stage}_classes.csv"
        write_table(table, rows)
        picture = matrix_picture(matrix, names)
        write_picture(folder / f"{stage}_confusion.png", Image.fromarray(picture))
        add_picture(trainer, f"{stage}/confusion", picture)
        return f"scores of each class: {table}"
