"""What a run of classification shows: the accuracy of each class, a confusion matrix, and predictions as a file."""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from linvit.callbacks.common import class_names, gather
from linvit.callbacks.report import Findings, Report, confusion_picture
from linvit.plain_text import CsvWriter


class ClassReport(Report):
    """Writes `val_classes.csv` (class, images, top-1) and `val_confusion.png`; after a test, `test_...`.

    The picture is of the weights that `predict_with` names.

    Args:
        folder: Where to write; null is the folder of the logger, and nothing is written without one.
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
        """Labels and predictions (1 + kinds of weights, N) of the images of all devices."""
        own = torch.cat(self._seen, 1).cpu().numpy() if self._seen else None
        parts = [part for part in gather(own, trainer) if part is not None]
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


class PredictionWriter(Callback):
    """Writes one row per image: its path, or its index where it has none; the class; the probability.

    Args:
        path: CSV file to write; or a folder, in which each data source has a file of its own, such as
            `predictions_digits.csv`.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._rows: dict[int, tuple[str, str, float]] = {}

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Discards the rows of an earlier prediction."""
        self._rows.clear()

    def on_predict_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Keeps the predictions of a batch."""
        outputs, batch, *_ = args
        names = pl_module.hparams.get("class_names")
        labels = [names[label] if names else str(label) for label in outputs["class"].tolist()]
        rows = zip(batch["id"], labels, outputs["probability"].tolist(), strict=True)
        self._rows.update(zip(batch["index"].tolist(), rows, strict=True))

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the rows of all devices in the order of the data set; padded duplicates count once."""
        rows = {index: row for part in gather(self._rows, trainer) for index, row in part.items()}
        file_name = file_of(getattr(trainer.datamodule, "predicted", None))  # type: ignore[attr-defined]
        path = self.path if self.path.suffix else self.path / file_name
        if trainer.is_global_zero:
            write_predictions(path, (row for _, row in sorted(rows.items())))
        rank_zero_info(f"wrote {len(rows)} predictions to {path}")


def write_predictions(path: Path, rows: Iterable[tuple[str, str, float]]) -> None:
    """Writes a table of images, their classes and the probabilities."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = CsvWriter(file)
        writer.writerow(["id", "class", "probability"])
        writer.writerows((name, label, f"{probability:.6f}") for name, label, probability in rows)


def file_of(source: str | None) -> str:
    """The file for the predictions of a data source; two sources of one name differ in a few digits at the end."""
    if source is None:
        return "predictions.csv"
    whole = str(Path(source).absolute()) if Path(source).exists() else source
    name = re.sub(r"[^\w.-]+", "_", re.split(r"[/\\]", whole)[-1])
    digits = "" if name == whole else f"_{hashlib.sha256(whole.encode()).hexdigest()[:6]}"
    return f"predictions_{name}{digits}.csv"
