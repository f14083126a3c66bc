"""TensorBoard, for callbacks that show pictures."""

from typing import Any

import numpy as np
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger


def writers(trainer: Trainer) -> list[Any]:
    """The writers of all TensorBoard loggers of a run."""
    return [logger.experiment for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]


def add_picture(trainer: Trainer, tag: str, picture: Any) -> None:
    """Shows a picture (H, W, 3), uint8, an array or one of PIL, at the current step."""
    for writer in writers(trainer):
        writer.add_image(tag, np.asarray(picture), trainer.global_step, dataformats="HWC")
