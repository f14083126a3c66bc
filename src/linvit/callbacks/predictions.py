"""Writes predictions as files, in one way for all tasks."""

import hashlib
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from linvit.callbacks.common import class_names, gather, pixels
from linvit.callbacks.dense import palette

REFUSED = {"posix": r"\0", "nt": r'[\0-\x1f<>:"|?*]'}
"""Characters that file names cannot contain; for "12:30.png" Windows would write a hidden part of a file "12"."""


class PredictionWriter(Callback):
    """Writes the results of a task's `image_results`: `predictions_SOURCE.csv`, or files of each image in a folder.

    Args:
        path: Folder, with a file or folder for each data source, such as `predictions_digits.csv`; or
            the CSV file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Discards the rows of an earlier prediction."""
        source = getattr(trainer.datamodule, "predicted", None)  # type: ignore[attr-defined]
        self._paths = PicturePaths(self.path, source, trainer.world_size == 1)
        self._colours = palette(pl_module.hparams["num_classes"])
        self._rows: dict[int, Any] = {}
        self._kind: Any = None
        self._wrote = ""

    def on_predict_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Writes the files of a batch, and stores the rows for the table of all images."""
        outputs, batch, *_ = args
        indices = batch["index"].tolist()
        numbers = batch.get("image_id") or [index + 1 for index in indices]  # as linvit predict --model counts them
        results = pl_module.image_results(outputs)  # type: ignore[operator]
        for index, number, name, image, result in zip(
            indices, numbers, batch["id"], batch["image"], results, strict=True
        ):
            result.class_names, result.name, result.colours = class_names(pl_module), str(name), self._colours
            result.read = partial(lambda own: torch.from_numpy(pixels(own, trainer)).permute(2, 0, 1), image)
            self._rows[index] = result.write(self._paths(result.name, index), int(number))
            self._kind = type(result)

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the table of all images, in the order of the dataset; padded duplicates count once."""
        shares = gather((self._kind, self._rows)) or []
        rows = {index: row for _, share in shares for index, row in share.items()}
        kind = next((kind for kind, _ in shares if kind is not None), None)
        if kind is not None:
            owners = trainer.datamodule, pl_module  # type: ignore[attr-defined]
            ids = next(filter(None, (getattr(one, "category_ids", None) for one in owners)), None)
            found = [rows[index] for index in sorted(rows)]
            path = kind.write_set(found, self._paths.folder, class_names(pl_module), ids)
            self._wrote = f"wrote {len(rows)} predictions to {path}"

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Prints the path of the predictions, after the progress bar has ended its line."""
        if stage == "predict" and self._wrote:
            rank_zero_info(self._wrote)


class PicturePaths:
    """Paths in the folder of a data source, `predictions_photos`. Subfolders of the source are kept.

    Unless a process is `alone`, others also write: file names then include the extension of an image below the source,
    and the number of any other image. A name in a table that cannot be a file name, such as "..", becomes the number.
    """

    def __init__(self, folder: Path, source: str | None, alone: bool = True) -> None:
        self.folder = folder if folder.suffix else folder / name_of(source)
        self.alone = alone
        self._source = None if source is None else Path(source).absolute()  # as the paths of images are
        self._names = {"legend": 1}  # which segmentation writes beside the masks

    def __call__(self, name: str, index: int) -> Path:
        """Returns the path of an image's files without extension; a number is added if it was used before."""
        inside = self._source is not None and Path(name).is_relative_to(self._source)
        kept = Path(name).relative_to(self._source) if inside else Path(Path(name).name)  # type: ignore[arg-type]
        if not kept.stem.strip(".") or ".." in kept.parts or re.search(REFUSED[os.name], str(kept)):
            inside, kept = False, Path(str(index))
        stem = str(kept.with_suffix(""))
        if not self.alone:
            return self.folder / (str(kept) if inside else f"{stem}_{index}")
        taken = stem
        while taken in self._names:
            self._names[stem] += 1
            taken = f"{stem}_{self._names[stem]}"
        self._names[taken] = 1
        return self.folder / taken


def name_of(source: str | None) -> str:
    """Returns the name for predictions of a data source; sources of equal names get different digits at the end."""
    if source is None:
        return "predictions"
    whole = str(Path(source).absolute()) if Path(source).exists() else source
    name = re.sub(r"[^\w.-]+", "_", re.split(r"[/\\]", whole)[-1])
    digits = "" if name == whole else f"_{hashlib.sha256(whole.encode()).hexdigest()[:6]}"
    return f"predictions_{name}{digits}"
