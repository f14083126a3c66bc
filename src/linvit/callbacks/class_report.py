"""The accuracy of each class as a table, and the confusion matrix as a picture."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from PIL import Image

from linvit.callbacks.gather import gather
from linvit.callbacks.report import Report, write_classes, write_picture
from linvit.callbacks.tensorboard import add_picture


class ClassReport(Report):
    """Writes `val_classes.csv` (class, images, top-1) and `val_confusion.png`; after a test, `test_...`.

    Training reports each validation, and writes the picture to TensorBoard, too. The picture is of the weights that
    `predict_with` names.

    Args:
        folder: Where to write; null is the folder of the logger, and nothing is written without one.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        super().__init__(folder)
        self._seen: list[torch.Tensor] = []
        self._weights: tuple[str, ...] = ()

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Discards the predictions of the last epoch."""
        self._seen.clear()

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Keeps labels and predictions of a batch, on their device."""
        outputs, batch, *_ = args
        self._weights = tuple(outputs)
        self._seen.append(torch.stack([batch["label"], *outputs.values()]))  # (1 + kinds of weights, B)

    on_test_epoch_start = on_validation_epoch_start
    on_test_batch_end = on_validation_batch_end  # type: ignore[assignment]

    def collect(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> np.ndarray | None:
        """Labels and predictions (1 + kinds of weights, N) of the images of all devices."""
        own = torch.cat(self._seen, 1).cpu().numpy() if self._seen else None
        parts = [part for part in gather(own, trainer) if part is not None]
        return np.concatenate(parts, 1) if parts else None

    def write(self, found: np.ndarray, trainer: Trainer, pl_module: LightningModule, folder: Path, stage: str) -> str:
        """Writes the table and the picture."""
        from linvit.callbacks.confusion_picture import confusion_picture  # here, since matplotlib takes half a second

        seen = dict(zip(("label", *self._weights), found, strict=True))
        label, classes, names = seen["label"], pl_module.hparams["num_classes"], pl_module.hparams["class_names"]
        images = np.bincount(label, minlength=classes)
        columns, scores = {"raw": "top1", "ema": "ema_top1"}, {}
        for kind in self._weights:
            right = np.bincount(label[label == seen[kind]], minlength=classes)
            scores[columns[kind]] = np.divide(right, images, out=np.full(classes, np.nan), where=images > 0)
        table = folder / f"{stage}_classes.csv"
        write_classes(table, pl_module, "images", images, scores)
        shown = seen.get(pl_module.hparams["predict_with"], seen["raw"])
        picture = confusion_picture(label, shown, classes, names)
        write_picture(folder / f"{stage}_confusion.png", Image.fromarray(picture))
        add_picture(trainer, f"{stage}/confusion", picture)
        return f"accuracy of each class: {table}"
