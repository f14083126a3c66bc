"""Images with labels and predictions laid over them, in TensorBoard and in the run's folder."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from PIL import Image
from torch import Tensor

from linvit.callbacks.class_names import class_names
from linvit.callbacks.dense.colours import class_palette, legend, overlay
from linvit.callbacks.dense.validation_pictures import ValidationPictures
from linvit.callbacks.pixels import pixels


class SegmentationPictures(ValidationPictures):
    """Writes `val_segmentation.png`: rows of image, labels and prediction, and a legend of the classes.

    Args:
        images: Rows of the picture.
    """

    name, titles, width = "segmentation", ("image", "labels", "prediction"), 320

    def rows(
        self, trainer: Trainer, pl_module: LightningModule, batch: dict[str, Any], predicted: Any
    ) -> Iterator[np.ndarray]:
        """Lays labels and predictions over the images of a batch; see `ValidationPictures`."""
        colours = class_palette(trainer, pl_module.hparams["num_classes"])
        for image, mask, classes in zip(batch["image"], batch["mask"], predicted, strict=True):
            picture = pixels(image, trainer)
            side = (self.width, max(round(self.width * picture.shape[0] / picture.shape[1]), 1))
            shown = np.asarray(Image.fromarray(picture).resize(side))
            maps = [np.asarray(_resized(found, side)) for found in (mask, classes)]
            yield np.concatenate([shown, *(overlay(shown, found, colours) for found in maps)], 1)

    def below(self, trainer: Trainer, pl_module: LightningModule) -> list[np.ndarray]:
        """The legend."""
        colours = class_palette(trainer, pl_module.hparams["num_classes"])
        return [np.asarray(legend(colours, class_names(pl_module), len(self.titles) * self.width))]


def _resized(classes: Tensor, side: tuple[int, int]) -> Image.Image:
    whole = Image.fromarray(classes.to(torch.int32).cpu().numpy(), mode="I")
    return whole.resize(side, Image.Resampling.NEAREST)
