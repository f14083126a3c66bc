"""Images with true and detected objects drawn over them, in TensorBoard and in the run's folder."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from lightning.pytorch import LightningModule, Trainer
from PIL import Image

from linvit.callbacks.class_names import class_names
from linvit.callbacks.dense.colours import class_palette
from linvit.callbacks.dense.validation_pictures import ValidationPictures
from linvit.callbacks.detection.drawing import draw
from linvit.callbacks.pixels import pixels


class DetectionPictures(ValidationPictures):
    """Writes `val_detection.png`: rows of image, truth and detections, with names and scores.

    Args:
        images: Rows of the picture.
        threshold: Detections of lower scores are left out.
    """

    name, titles, width = "detection", ("image", "truth", "detections"), 400

    def __init__(self, images: int = 4, threshold: float = 0.3) -> None:
        super().__init__(images)
        self.threshold = threshold

    def rows(
        self, trainer: Trainer, pl_module: LightningModule, batch: dict[str, Any], predicted: Any
    ) -> Iterator[np.ndarray]:
        """Draws the images of a batch; see `ValidationPictures`."""
        colours, names = class_palette(trainer, pl_module.hparams["num_classes"]), class_names(pl_module)
        for image, pair in zip(batch["image"], predicted, strict=True):
            plain = enlarged(Image.fromarray(pixels(image, trainer)), self.width, self.width)
            shown = [plain, plain.copy(), plain.copy()]
            for picture, objects in zip(shown[1:], pair, strict=True):
                draw(picture, objects, colours, names, self.threshold)
            yield np.concatenate([np.asarray(picture) for picture in shown], 1)


def enlarged(picture: Image.Image, least: int, most: int) -> Image.Image:
    """A picture whose width lies between two bounds, with its aspect."""
    width = min(max(picture.width, least), most)
    return picture.resize((width, max(round(picture.height * width / picture.width), 1)))
