"""Predicted masks as files."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from PIL import Image

from linvit.callbacks.prediction_writer import file_of
from linvit.callbacks.segmentation.colours import class_palette, legend, overlay
from linvit.callbacks.segmentation.pictures import pixels


class MaskWriter(Callback):
    """Writes `NAME.png`, whose values are the classes, and `NAME_overlay.jpg` for each image, at its original size.

    A mask has 8 bits for up to 256 classes, else 16. Images in folders below the source keep these folders.
    `legend.png` names the colours.

    Args:
        path: Folder, in which each data source has a folder of its own, such as `predictions_photos`.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._names: dict[str, int] = {}

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Makes the folder and the legend."""
        self._names.clear()
        self._source = getattr(trainer.datamodule, "predicted", None)  # type: ignore[attr-defined]
        self._folder = self.path / Path(file_of(self._source)).stem
        classes, names = pl_module.hparams["num_classes"], pl_module.hparams["class_names"]
        self._colours = class_palette(trainer, classes)
        if trainer.is_global_zero:
            self._folder.mkdir(parents=True, exist_ok=True)
            legend(self._colours, names or [str(i) for i in range(classes)], 600).save(self._folder / "legend.png")
        trainer.strategy.barrier()

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Writes the files of a batch."""
        for name, image, found in zip(outputs["id"], batch["image"], outputs["classes"], strict=True):
            classes = found.to(torch.int32).cpu().numpy()
            target = self._target(str(name))
            target.parent.mkdir(parents=True, exist_ok=True)
            kind = np.uint8 if len(self._colours) <= 256 else np.uint16
            Image.fromarray(classes.astype(kind)).save(target.with_name(f"{target.name}.png"))
            picture = Image.fromarray(pixels(image, trainer)).resize(classes.shape[::-1])
            shown = Image.fromarray(overlay(np.asarray(picture), classes, self._colours))
            shown.save(target.with_name(f"{target.name}_overlay.jpg"), quality=92)

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Says how many there are and where."""
        count = torch.tensor(sum(self._names.values()), device=pl_module.device)
        total = int(trainer.strategy.reduce(count, reduce_op="sum"))
        rank_zero_info(f"wrote {total} masks and overlays to {self._folder}")

    def _target(self, name: str) -> Path:
        """The path of an image's files without their endings; a number is added where it came before."""
        inside = self._source is not None and Path(name).is_relative_to(self._source)
        stem = str((Path(name).relative_to(self._source or "") if inside else Path(Path(name).name)).with_suffix(""))
        self._names[stem] = number = self._names.get(stem, 0) + 1
        return self._folder / (stem if number == 1 else f"{stem}_{number}")
