"""TensorBoard, for callbacks that show pictures."""

from typing import Any

import numpy as np
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger


def writers(trainer: Trainer) -> list[Any]:
    """The writers of all TensorBoard loggers of a run."""
    return [logger.experiment for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]


def current_step(trainer: Trainer) -> int:
    """The step at which Lightning logs: that of the batch in work, and in validation of the batch before it.

    What a checkpoint of this moment is followed by has later steps, so it is not taken for what a kill has left.
    """
    return trainer.global_step - (trainer.state.fn == "fit" and trainer.validating)


def add_picture(trainer: Trainer, tag: str, picture: Any) -> None:
    """Shows a picture (H, W, 3), uint8, an array or one of PIL, at the current step."""
    for writer in writers(trainer):
        writer.add_image(tag, np.asarray(picture), current_step(trainer), dataformats="HWC")
