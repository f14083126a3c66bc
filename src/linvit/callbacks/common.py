"""Helpers of callbacks: gathering over ranks, names of classes, images as pictures, TensorBoard."""

from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, distributed


class Paper(NamedTuple):
    """Colours of a picture's background and of its text."""

    back: str
    ink: str


LIGHT, DARK = Paper("white", "black"), Paper("#161b20", "#e4e7ea")


def gather(own: Any) -> list[Any] | None:
    """Returns the objects of all ranks, in order, on rank 0; None on others. All must call it."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return [own]
    parts: list[Any] | None = [None] * distributed.get_world_size() if distributed.get_rank() == 0 else None
    distributed.gather_object(own, parts)
    return parts


def class_names(pl_module: LightningModule) -> list[str]:
    """Returns the names of the classes of a task, or their numbers."""
    return list(pl_module.hparams["class_names"] or map(str, range(pl_module.hparams["num_classes"])))


def rgb(images: Tensor) -> Tensor:
    """Returns the first three channels of images (..., C, H, W), or the first one three times if there are fewer."""
    return images[..., :3, :, :] if images.shape[-3] >= 3 else images[..., [0, 0, 0], :, :]


def pixels(images: Tensor, of: Any) -> np.ndarray:
    """Returns images (..., C, H, W), normalised by a data module or a trainer's, as (..., H, W, 3), uint8."""
    data = getattr(of, "datamodule", of)
    mean, std = (torch.tensor(statistic).view(-1, 1, 1) for statistic in (data.mean, data.std))
    shown = rgb(images.float().cpu() * std + mean)
    picture: np.ndarray = (255 * shown).round().clamp(0, 255).to(torch.uint8).movedim(-3, -1).numpy()
    return picture


def writers(trainer: Trainer) -> list[Any]:
    """Returns the writers of all TensorBoard loggers of a run."""
    return [logger.experiment for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]


def add_picture(trainer: Trainer, tag: str, picture: Any) -> None:
    """Shows a picture (H, W, 3), uint8, an array or a PIL image, at the step at which Lightning logs.

    This is the step of the current batch, and in validation that of the previous batch: pictures after a checkpoint of
    this moment have later steps, so they are not taken for the remains of a killed run.
    """
    step = trainer.global_step - (trainer.state.fn == "fit" and trainer.validating)
    for writer in writers(trainer):
        writer.add_image(tag, np.asarray(picture), step, dataformats="HWC")
