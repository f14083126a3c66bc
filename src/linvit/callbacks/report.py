"""What the reports of all tasks share: when they are written, and where."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from PIL import Image

from linvit.callbacks.class_names import class_names
from linvit.files import rewriting
from linvit.plain_text import CsvWriter


class Report(Callback):
    """Writes files about each validation, and about each `linvit test`; those of the last one stay.

    A subclass supplies `collect` and `write`.

    Args:
        folder: Where to write; null is the folder of the logger, and nothing is written without one.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = folder
        self._found: Any = None
        self._words = ""

    def collect(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> Any:
        """What is reported of the set that was just evaluated, or None. All ranks call it before metrics are reset."""
        raise NotImplementedError

    def write(self, found: Any, trainer: Trainer, pl_module: LightningModule, folder: Path, stage: str) -> str:
        """Writes what `collect` returned about a stage, "val" or "test", into a folder. Rank 0 calls it.

        Returns:
            What to tell the user of it.
        """
        raise NotImplementedError

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Collects."""
        self._found = self.collect(trainer, pl_module, "val")

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Collects."""
        self._found = self.collect(trainer, pl_module, "test")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reports, before a checkpoint of this moment is written."""
        if not trainer.sanity_checking:
            self._report(trainer, pl_module, "val")
            if trainer.state.fn == "validate":
                self._tell()

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reports."""
        self._report(trainer, pl_module, "test")
        self._tell()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Says where the report of the last validation is."""
        self._tell()

    def _report(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        found = self._found
        folder = self.folder or (trainer.log_dir if trainer.loggers else None)  # all ranks ask for that of rank 0
        if found is None or folder is None or trainer.fast_dev_run or not trainer.is_global_zero:  # type: ignore[attr-defined]
            return
        with training_on(trainer):
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._words = self.write(found, trainer, pl_module, Path(folder), stage)

    def _tell(self) -> None:
        if self._words:
            rank_zero_info(self._words)


@contextmanager
def training_on(trainer: Trainer) -> Iterator[None]:
    """Makes a warning of the error that a report cannot be written, if a run is in training."""
    try:
        yield
    except OSError as error:
        if trainer.state.fn != "fit":
            raise
        rank_zero_warn(f"a report of step {trainer.global_step} could not be written: {error}")


def write_classes(
    path: Path, pl_module: LightningModule, unit: str, counts: np.ndarray, scores: Mapping[str, np.ndarray]
) -> list[list[str]]:
    """Writes a row per class: its name, how many images, pixels or objects it has (K,), and scores (K,); NaN is empty.

    Returns:
        The rows, the names of the columns first.
    """
    rows = [["class", unit, *scores]]
    for name, count, *values in zip(class_names(pl_module), counts.tolist(), *scores.values(), strict=True):
        rows.append([name, str(count), *("" if np.isnan(value) else f"{value:.6f}" for value in values)])
    write_table(path, rows)
    return rows


def write_table(path: Path, rows: Iterable[Sequence[Any]]) -> None:
    """Writes rows as CSV, the names of the columns first."""
    with rewriting(path) as part, part.open("w", encoding="utf-8", newline="") as file:
        CsvWriter(file).writerows(rows)


def write_picture(path: Path, picture: Image.Image) -> None:
    """Writes a picture as PNG."""
    with rewriting(path) as part:
        picture.save(part, "PNG")
