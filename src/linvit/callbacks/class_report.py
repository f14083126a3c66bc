"""The accuracy of each class as a table, and the confusion matrix as a picture."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info

from linvit.callbacks.confusion_picture import confusion_picture
from linvit.plain_text import CsvWriter


class ClassReport(Callback):
    """Writes `val_classes.csv` (class, images, top-1) and `val_confusion.png`; after a test, `test_...`.

    Training reports its last validation, and writes the picture to TensorBoard, too. The picture is of the weights that
    `predict_with` names.

    Args:
        folder: Where to write; null is the folder of the logger, and nothing is written without one.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = folder
        self._seen: list[torch.Tensor] = []
        self._weights: tuple[str, ...] = ()

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Discards the predictions of the last epoch."""
        self._seen.clear()

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keeps labels and predictions of a batch, on their device."""
        self._weights = tuple(outputs)
        self._seen.append(torch.stack([batch["label"], *outputs.values()]))  # (1 + kinds of weights, B)

    on_test_epoch_start, on_test_batch_end = on_validation_epoch_start, on_validation_batch_end

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
        own = torch.cat(self._seen, 1).cpu().numpy() if self._seen else None
        parts: list[Any] = [own]
        if trainer.world_size > 1:
            parts = [None] * trainer.world_size
            torch.distributed.all_gather_object(parts, own)
        parts = [part for part in parts if part is not None]
        if not parts or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        seen = np.concatenate(parts, 1)
        folder = self.folder or (trainer.log_dir if trainer.loggers else None)
        if trainer.is_global_zero and folder is not None:
            named = dict(zip(("label", *self._weights), seen, strict=True))
            self._write(trainer, pl_module, named, Path(folder), stage)

    def _write(
        self, trainer: Trainer, pl_module: LightningModule, seen: dict[str, np.ndarray], folder: Path, stage: str
    ) -> None:
        label, classes, names = seen["label"], pl_module.hparams["num_classes"], pl_module.hparams["class_names"]
        images = np.bincount(label, minlength=classes)
        columns = {"raw": "top1", "ema": "ema_top1"}
        right = {columns[kind]: np.bincount(label[label == seen[kind]], minlength=classes) for kind in self._weights}
        folder.mkdir(parents=True, exist_ok=True)
        table = folder / f"{stage}_classes.csv"
        with table.open("w", encoding="utf-8", newline="") as file:
            writer = CsvWriter(file)
            writer.writerow(["class", "images", *right])
            for i, count in enumerate(images):
                tops = [f"{hits[i] / count:.6f}" if count else "" for hits in right.values()]
                writer.writerow([names[i] if names else i, count, *tops])
        shown = seen.get(pl_module.hparams["predict_with"], seen["raw"])
        picture = confusion_picture(label, shown, classes, names)
        picture.save(folder / f"{stage}_confusion.png")
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                pixels = np.asarray(picture)
                logger.experiment.add_image(f"{stage}/confusion", pixels, trainer.global_step, dataformats="HWC")
        rank_zero_info(f"accuracy of each class: {table}")
