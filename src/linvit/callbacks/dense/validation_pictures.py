"""Images of the validation set beside what is true and what is predicted, in TensorBoard and in the run's folder."""

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer
from PIL import Image

from linvit.callbacks.dense.colours import captions
from linvit.callbacks.report import training_on, write_picture
from linvit.callbacks.tensorboard import add_picture


class ValidationPictures(Callback):
    """Writes a picture at each validation: a row for each of the first images of rank 0's part of the set.

    TensorBoard has all of them (`val/NAME`), and `val_NAME.png` in the run's folder is the last. Predictions are those
    of the weights that `predict_with` names. A subclass supplies `name`, `titles`, `width` and `rows`.

    Args:
        images: Rows of the picture.
    """

    name: ClassVar[str]
    """Of the picture."""
    titles: ClassVar[tuple[str, ...]]
    """Of the columns."""
    width: ClassVar[int]
    """Pixels of a column."""

    def __init__(self, images: int = 4) -> None:
        self.images = images
        self._rows: list[np.ndarray] = []

    def rows(
        self, trainer: Trainer, pl_module: LightningModule, batch: dict[str, Any], predicted: Any
    ) -> Iterable[np.ndarray]:
        """The rows of the images of a batch, each (H, columns x width, 3), uint8; only those that are shown are made.

        Args:
            trainer: Of the run.
            pl_module: The task.
            batch: Of validation.
            predicted: What `score_batch` of the task returned for it.
        """
        raise NotImplementedError

    def below(self, trainer: Trainer, pl_module: LightningModule) -> list[np.ndarray]:
        """What stands below the rows, as wide as they are."""
        return []

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Discards the rows of the last validation."""
        self._rows.clear()

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Makes the rows of the first images."""
        outputs, batch, *_ = args
        missing = self.images - len(self._rows)
        if trainer.is_global_zero and trainer.loggers and missing > 0:
            predicted = outputs.get(pl_module.hparams["predict_with"], outputs["raw"])
            self._rows += islice(self.rows(trainer, pl_module, batch, predicted), missing)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the picture."""
        folder = trainer.log_dir  # all ranks ask for it, since it is that of rank 0
        if not self._rows or folder is None or trainer.sanity_checking:
            return
        titles = np.asarray(captions(self.titles, self.width))
        picture = np.concatenate([titles, *self._rows, *self.below(trainer, pl_module)])
        with training_on(trainer):
            Path(folder).mkdir(parents=True, exist_ok=True)
            write_picture(Path(folder) / f"val_{self.name}.png", Image.fromarray(picture))
        add_picture(trainer, f"val/{self.name}", picture)
