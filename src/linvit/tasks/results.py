"""Prediction for one image: base class of the tasks' results."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from linvit.callbacks.common import rgb
from linvit.callbacks.dense import palette
from linvit.callbacks.predictions import PicturePaths
from linvit.errors import UserError


@dataclass(kw_only=True)
class Result:
    """A prediction for an image; a task's own class adds the predicted values, and `plot` and `save`.

    Attributes:
        class_names: Of all classes.
        category_ids: COCO's ids of all classes, if the data have such.
        source: The image as it was given: a path, or a picture, array or tensor.
        name: What messages and files call it: its path, or its number.
        read: Reads the source: an image (C, H, W) from 0 to 255.
        colours: Of the classes (K, 3), uint8, where the data have some.
    """

    class_names: list[str] = field(default_factory=list, repr=False)
    category_ids: list[int] | None = field(default=None, repr=False)
    source: Any = field(default=None, repr=False)
    name: str = ""
    read: Callable[[], Tensor] | None = field(default=None, repr=False)
    colours: Any = field(default=None, repr=False)

    @property
    def image(self) -> Image.Image:
        """The original image as RGB, which is read again; of several bands the first three."""
        if self.read is None:
            raise UserError(f"the image {self.name!r} is not known any more")
        pixels = rgb(self.read().float()).round().clamp(0, 255).to(torch.uint8)
        return Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())

    @property
    def palette(self) -> np.ndarray:
        """A colour for each class (K, 3), uint8."""
        return palette(len(self.class_names)) if self.colours is None else np.asarray(self.colours)

    def plot(self) -> Image.Image:
        """Returns the image with the prediction."""
        return self.image

    def save(self, path: str | Path) -> Path:
        """Writes the prediction to a file; returns its path."""
        raise UserError(f"{type(self).__name__} cannot be saved: its class needs a method `save`")

    def write(self, target: Path, number: int) -> Any:
        """Writes the files of the image, whose paths begin with `target`; what `write_set` needs of image `number`."""
        target.parent.mkdir(parents=True, exist_ok=True)
        self.save(target)

    @classmethod
    def write_set(
        cls, rows: Sequence[Any], path: Path, class_names: Sequence[str], ids: Sequence[int] | None = None
    ) -> Path:
        """Writes the table of all images from the rows that `write` returned, to or into `path`; returns its path.

        `ids` are COCO's of the classes.
        """
        return path

    @classmethod
    def save_all(cls, results: Iterable[Any], folder: Path, source: str | None = None) -> Path:
        """Writes the predictions for the images of a source, one after another; returns where they are."""
        paths, rows, names, ids = PicturePaths(folder, source), list[Any](), list[str](), None
        for number, each in enumerate(results, 1):
            rows.append(each.write(paths(each.name, number), number))
            names, ids = each.class_names, each.category_ids
        return cls.write_set(rows, paths.folder, names, ids)
