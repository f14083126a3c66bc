"""Images with labels and predictions laid over them, in TensorBoard and in the run's folder."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image
from torch import Tensor

from linvit.callbacks.segmentation.colours import captions, class_palette, legend, overlay

WIDTH = 320  # pixels of an image in the picture


class SegmentationPictures(Callback):
    """Writes a picture at each validation: rows of image, labels and prediction, and a legend of the classes.

    TensorBoard has all of them, and `val_segmentation.png` in the run's folder is the last.

    The images are the first ones of rank 0's part of the set, those of the weights that `predict_with` names.

    Args:
        images: Rows of the picture.
    """

    def __init__(self, images: int = 4) -> None:
        self.images = images
        self._rows: list[np.ndarray] = []

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Discards the rows of the last validation."""
        self._rows.clear()

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keeps the first images of the set, with their labels and predictions."""
        if not trainer.is_global_zero or len(self._rows) >= self.images:
            return
        predicted = outputs.get(pl_module.hparams["predict_with"], outputs["raw"])
        colours = class_palette(trainer, pl_module.hparams["num_classes"])
        for image, mask, classes in zip(batch["image"], batch["mask"], predicted, strict=True):
            if len(self._rows) < self.images:
                self._rows.append(_row(pixels(image, trainer), mask, classes, colours))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the picture."""
        folder = trainer.log_dir  # all ranks ask for it, since it is that of rank 0
        if not self._rows or folder is None or trainer.sanity_checking:
            return
        classes, names = pl_module.hparams["num_classes"], pl_module.hparams["class_names"]
        names = names or [str(i) for i in range(classes)]
        titles = np.asarray(captions(["image", "labels", "prediction"], WIDTH))
        rows = [titles, *self._rows, np.asarray(legend(class_palette(trainer, classes), names, 3 * WIDTH))]
        picture = np.concatenate(rows)
        Path(folder).mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(Path(folder) / "val_segmentation.png")
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_image("val/segmentation", picture, trainer.global_step, dataformats="HWC")


def pixels(image: Tensor, trainer: Trainer) -> np.ndarray:
    """An image (3, H, W) that the data module has normalised as a picture (H, W, 3), uint8."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    mean, std = (image.new_tensor(statistic).view(-1, 1, 1) for statistic in (data.mean, data.std))
    shown = image.float() * std + mean
    picture: np.ndarray = (255 * shown).round().clamp(0, 255).to(torch.uint8).movedim(0, 2).cpu().numpy()
    return picture


def _row(picture: np.ndarray, mask: Tensor, classes: Tensor, colours: np.ndarray) -> np.ndarray:
    """A picture, its labels and its prediction side by side: (H, 3 WIDTH, 3)."""
    side = (WIDTH, max(round(WIDTH * picture.shape[0] / picture.shape[1]), 1))
    shown = np.asarray(Image.fromarray(picture).resize(side))
    maps = [np.asarray(_resized(found, side)) for found in (mask, classes)]
    return np.concatenate([shown, *(overlay(shown, found, colours) for found in maps)], 1)


def _resized(classes: Tensor, side: tuple[int, int]) -> Image.Image:
    whole = Image.fromarray(classes.to(torch.int32).cpu().numpy(), mode="I")
    return whole.resize(side, Image.Resampling.NEAREST)
