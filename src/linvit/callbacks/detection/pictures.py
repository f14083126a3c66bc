"""Images with true and detected objects drawn over them, in TensorBoard and in the run's folder."""

from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image

from linvit.callbacks.detection.drawing import draw
from linvit.callbacks.segmentation.colours import captions, class_palette
from linvit.callbacks.segmentation.pictures import pixels

WIDTH = 400  # pixels of an image in the picture


class DetectionPictures(Callback):
    """Writes a picture at each validation: rows of image, truth and detections, with names and scores.

    TensorBoard has all of them, and `val_detection.png` in the run's folder is the last.

    The images are the first ones of rank 0's part of the set, the detections those of the weights that `predict_with`
    names.

    Args:
        images: Rows of the picture.
        threshold: Detections of lower scores are left out.
    """

    def __init__(self, images: int = 4, threshold: float = 0.3) -> None:
        self.images = images
        self.threshold = threshold
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
        """Draws the first images of the set."""
        if not trainer.is_global_zero or len(self._rows) >= self.images or not trainer.loggers:
            return
        found = outputs.get(pl_module.hparams["predict_with"], outputs["raw"])
        colours, names = class_palette(trainer, pl_module.hparams["num_classes"]), class_names(pl_module)
        for image, pair in zip(batch["image"], found, strict=True):
            if len(self._rows) < self.images:
                plain = enlarged(Image.fromarray(pixels(image, trainer)), WIDTH, WIDTH)
                shown = [plain, plain.copy(), plain.copy()]
                for picture, objects in zip(shown[1:], pair, strict=True):
                    draw(picture, objects, colours, names, self.threshold)
                self._rows.append(np.concatenate([np.asarray(picture) for picture in shown], 1))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the picture."""
        folder = trainer.log_dir  # all ranks ask for it, since it is that of rank 0
        if not self._rows or folder is None or trainer.sanity_checking:
            return
        picture = np.concatenate([np.asarray(captions(["image", "truth", "detections"], WIDTH)), *self._rows])
        Path(folder).mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(Path(folder) / "val_detection.png")
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_image("val/detection", picture, trainer.global_step, dataformats="HWC")


def class_names(pl_module: LightningModule) -> list[str]:
    """Names of the classes of a task, or their numbers."""
    return list(pl_module.hparams["class_names"] or map(str, range(pl_module.hparams["num_classes"])))


def enlarged(picture: Image.Image, least: int, most: int) -> Image.Image:
    """A picture whose width lies between two bounds, with its aspect."""
    width = min(max(picture.width, least), most)
    return picture.resize((width, max(round(picture.height * width / picture.width), 1)))
