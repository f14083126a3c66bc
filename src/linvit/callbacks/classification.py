"""What a run of classification shows: the accuracy of each class, and a confusion matrix."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer

from linvit.callbacks.common import class_names, gather
from linvit.callbacks.report import Findings, Report, confusion_picture


class ClassReport(Report):
    """Writes `val_classes.csv` (class, images, top-1) and `val_confusion.png`; after a test, `test_...`.

    The picture is of the weights that `predict_with` names.
    """

    name = "confusion"

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
        """Labels and predictions (1 + kinds of weights, N) of the images of all devices, on rank 0."""
        own = torch.cat(self._seen, 1).cpu().numpy() if self._seen else None
        parts = [part for part in gather(own) or [] if part is not None]
        return np.concatenate(parts, 1) if parts else None

    def findings(self, found: np.ndarray, pl_module: LightningModule) -> Findings:
        """Images and accuracy of each class."""
        seen = dict(zip(("label", *self._weights), found, strict=True))
        label, names = seen["label"], class_names(pl_module)
        images = np.bincount(label, minlength=len(names))
        columns, scores = {"raw": "top1", "ema": "ema_top1"}, {}
        for kind in self._weights:
            right = np.bincount(label[label == seen[kind]], minlength=len(names))
            scores[columns[kind]] = np.divide(right, images, out=np.full(len(names), np.nan), where=images > 0)
        shown = seen.get(pl_module.hparams["predict_with"], seen["raw"])
        return Findings("images", images, scores, confusion_picture(label, shown, names))
