"""The scores of each class as a table, and the confusion matrix of pixels as a picture."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info

from linvit.callbacks.confusion_picture import matrix_picture
from linvit.plain_text import CsvWriter


class SegmentationReport(Callback):
    """Writes `val_classes.csv` (class, pixels, IoU, Acc, F1) and `val_confusion.png`; after a test, `test_...`.

    Training reports its last validation, and writes the picture to TensorBoard, too. Both are of the weights that
    `predict_with` names. The task offers `class_table(stage)`: the confusion matrix, and scores of each class.

    Args:
        folder: Where to write; null is the folder of the logger, and nothing is written without one.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = folder
        self._last: tuple[torch.Tensor, dict[str, torch.Tensor]] | None = None

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keeps the matrix before the task empties it."""
        self._last = cast("Any", pl_module).class_table("val")

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keeps the matrix before the task empties it."""
        self._last = cast("Any", pl_module).class_table("test")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reports the last validation."""
        self._report(trainer, pl_module, "val")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reports unless training goes on."""
        if trainer.state.fn == "validate":
            self._report(trainer, pl_module, "val")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reports."""
        self._report(trainer, pl_module, "test")

    def _report(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        folder = self.folder or (trainer.log_dir if trainer.loggers else None)
        if self._last is None or folder is None or trainer.fast_dev_run or not trainer.is_global_zero:  # type: ignore[attr-defined]
            return
        matrix, scores = self._last[0].cpu().numpy(), {name: values.cpu() for name, values in self._last[1].items()}
        names = pl_module.hparams["class_names"] or [str(i) for i in range(len(matrix))]
        Path(folder).mkdir(parents=True, exist_ok=True)
        table = Path(folder) / f"{stage}_classes.csv"
        with table.open("w", encoding="utf-8", newline="") as file:
            writer = CsvWriter(file)
            writer.writerow(["class", "pixels", *scores])
            for i, (name, pixels) in enumerate(zip(names, matrix.sum(1), strict=True)):
                values = [values[i].item() for values in scores.values()]
                writer.writerow([name, pixels, *("" if np.isnan(value) else f"{value:.6f}" for value in values)])
        picture = matrix_picture(matrix, names)
        picture.save(Path(folder) / f"{stage}_confusion.png")
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                pixels = np.asarray(picture)
                logger.experiment.add_image(f"{stage}/confusion", pixels, trainer.global_step, dataformats="HWC")
        rank_zero_info(f"scores of each class: {table}")
