"""Predictions as a CSV file: id (path or index), class, probability."""

import csv
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info


class PredictionWriter(Callback):
    """Writes one row per image: its path, or its index where it has none; the class; the probability.

    Args:
        path: File to write.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._rows: dict[int, tuple[str, str, float]] = {}

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts with no rows."""
        self._rows.clear()

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keeps the predictions of a batch."""
        names = pl_module.hparams.get("class_names")
        labels = [names[label] if names else str(label) for label in outputs["class"].tolist()]
        rows = zip(batch["id"], labels, outputs["probability"].tolist(), strict=True)
        self._rows.update(zip(batch["index"].tolist(), rows, strict=True))

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the rows of all devices in the order of the data set; padded duplicates count once."""
        shares: list[Any] = [self._rows]
        if trainer.world_size > 1:
            shares = [None] * trainer.world_size
            torch.distributed.all_gather_object(shares, self._rows)
        rows = {index: row for share in shares for index, row in share.items()}
        if trainer.is_global_zero:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("w", encoding="utf-8", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(["id", "class", "probability"])
                writer.writerows((name, label, f"{p:.6f}") for _, (name, label, p) in sorted(rows.items()))
        rank_zero_info(f"{len(rows)} predictions: {self.path}")
