"""Predictions as a CSV file: id (path or index), class, probability."""

import hashlib
import re
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from linvit.callbacks.gather import gather
from linvit.plain_text import CsvWriter


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
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w", encoding="utf-8", newline="") as file:
                writer = CsvWriter(file)
                writer.writerow(["id", "class", "probability"])
                writer.writerows((name, label, f"{p:.6f}") for _, (name, label, p) in sorted(rows.items()))
        rank_zero_info(f"wrote {len(rows)} predictions to {path}")


def file_of(source: str | None) -> str:
    """The file for the predictions of a data source; two sources of one name differ in a few digits at the end."""
    if source is None:
        return "predictions.csv"
    whole = str(Path(source).absolute()) if Path(source).exists() else source
    name = re.sub(r"[^\w.-]+", "_", re.split(r"[/\\]", whole)[-1])
    digits = "" if name == whole else f"_{hashlib.sha256(whole.encode()).hexdigest()[:6]}"
    return f"predictions_{name}{digits}.csv"
