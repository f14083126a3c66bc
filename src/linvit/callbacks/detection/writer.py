"""Detections as COCO's JSON, and drawn over the images."""

import json
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from PIL import Image

from linvit.callbacks.class_names import class_names
from linvit.callbacks.dense.colours import class_palette
from linvit.callbacks.dense.picture_paths import PicturePaths
from linvit.callbacks.detection.drawing import draw
from linvit.callbacks.detection.pictures import enlarged
from linvit.callbacks.gather import gather
from linvit.callbacks.pixels import pixels

WIDTH = (480, 1600)  # pixels of a picture


class DetectionWriter(Callback):
    """Writes `results.json`, `images.json`, and for each image `NAME.jpg` with its detections.

    `results.json` is a list of detections in COCO's format, in pixels of the original images: `image_id`,
    `category_id`, `bbox` (x, y, width, height), `score` and, with masks, `segmentation` (an RLE). `images.json` says
    which image and which class has which id; COCO's tools read it as annotations, and then the results. Pictures are of
    the size that the network saw, small ones enlarged. Images in folders below the source keep these folders.

    Args:
        path: Folder, in which each data source has a folder of its own, such as `predictions_photos`.
        threshold: Detections of lower scores are not drawn.
    """

    def __init__(self, path: str | Path, threshold: float = 0.3) -> None:
        self.path = Path(path)
        self.threshold = threshold
        self._found: dict[int, tuple[int, str, Any]] = {}

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Discards the detections of an earlier prediction."""
        self._found.clear()
        self._paths = PicturePaths(self.path, getattr(trainer.datamodule, "predicted", None))  # type: ignore[attr-defined]
        self._colours = class_palette(trainer, pl_module.hparams["num_classes"])

    def on_predict_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Draws the images of a batch and keeps their detections."""
        outputs, batch, *_ = args
        names = class_names(pl_module)
        indices, ids = batch["index"].tolist(), batch.get("image_id")
        rows = zip(indices, ids or indices, outputs["id"], batch["image"], outputs["objects"], strict=True)
        for index, number, name, image, objects in rows:
            self._found[index] = int(number), str(name), objects
            picture = enlarged(Image.fromarray(pixels(image, trainer)), *WIDTH)
            draw(picture, objects, self._colours, names, self.threshold)
            target = self._paths(str(name))
            picture.save(target.with_name(f"{target.name}.jpg"), quality=92)

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the detections of all devices in the order of the data set; padded duplicates count once."""
        found = {index: pair for part in gather(self._found, trainer) for index, pair in part.items()}
        if trainer.is_global_zero:
            self._write(trainer, class_names(pl_module), [found[index] for index in sorted(found)])
        rank_zero_info(f"wrote the detections of {len(found)} images to {self._paths.folder}")

    def _write(self, trainer: Trainer, names: list[str], found: list[tuple[int, str, Any]]) -> None:
        ids = getattr(trainer.datamodule, "category_ids", None) or [*range(1, len(names) + 1)]  # type: ignore[attr-defined]
        images = [
            {"id": number, "file_name": name, "height": objects.size[0], "width": objects.size[1]}
            for number, name, objects in found
        ]
        categories = [{"id": number, "name": name} for number, name in zip(ids, names, strict=True)]
        results = [one for number, _, objects in found for one in objects.annotations(number, ids)]
        content = {"results": results, "images": {"images": images, "annotations": [], "categories": categories}}
        self._paths.folder.mkdir(parents=True, exist_ok=True)
        for name, value in content.items():
            (self._paths.folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
