"""Predicted masks as files."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from PIL import Image

from linvit.callbacks.class_names import class_names
from linvit.callbacks.dense.colours import class_palette, legend, overlay
from linvit.callbacks.dense.picture_paths import PicturePaths
from linvit.callbacks.pixels import pixels
from linvit.rasters import georeference, write_tiff


class MaskWriter(Callback):
    """Writes `NAME.png`, whose values are the classes, and `NAME_overlay.jpg` for each image, at its original size.

    The mask of a GeoTIFF is one, too, `NAME.tif`, with its georeference. A mask has 8 bits for up to 256 classes, else
    16. Images in folders below the source keep these folders.
    `legend.png` names the colours.

    Args:
        path: Folder, in which each data source has a folder of its own, such as `predictions_photos`.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Makes the folder and the legend."""
        self._paths = PicturePaths(self.path, getattr(trainer.datamodule, "predicted", None))  # type: ignore[attr-defined]
        self._colours = class_palette(trainer, pl_module.hparams["num_classes"])
        if trainer.is_global_zero:
            self._paths.folder.mkdir(parents=True, exist_ok=True)
            shown = legend(self._colours, class_names(pl_module), 600)
            shown.save(self._paths.folder / "legend.png")
        trainer.strategy.barrier()

    def on_predict_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Writes the files of a batch."""
        outputs, batch, *_ = args
        for name, image, found in zip(outputs["id"], batch["image"], outputs["classes"], strict=True):
            classes = found.to(torch.int32).cpu().numpy()
            target = self._paths(str(name))
            kind = np.uint8 if len(self._colours) <= 256 else np.uint16
            place, saved = georeference(str(name)), classes.astype(kind)
            if place is None:
                Image.fromarray(saved).save(target.with_name(f"{target.name}.png"))
            else:
                colours = self._colours.tolist() if kind is np.uint8 else ()
                write_tiff(target.with_name(f"{target.name}.tif"), saved[None], place, colours)
            picture = Image.fromarray(pixels(image, trainer)).resize(classes.shape[::-1])
            shown = Image.fromarray(overlay(np.asarray(picture), classes, self._colours))
            shown.save(target.with_name(f"{target.name}_overlay.jpg"), quality=92)

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Says how many there are and where."""
        count = torch.tensor(self._paths.count, device=pl_module.device)
        total = int(trainer.strategy.reduce(count, reduce_op="sum"))
        rank_zero_info(f"wrote {total} masks and overlays to {self._paths.folder}")
