"""Labelled images: embedded, from disk, or from the hub, through one loading path."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypedDict

import datasets
import numpy as np
from lightning.pytorch.utilities import rank_zero_info
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from linvit.data.base import IMAGENET_MEAN, IMAGENET_STD, ImageData
from linvit.data.sources import as_images, as_indices, column, load_splits
from linvit.data.transforms import Augmentation, eval_transform, train_transform
from linvit.errors import UserError


class Sample(TypedDict, total=False):
    """One image: a normalised tensor (3, H, W), its class, its index in the split, its path (else the index)."""

    image: Tensor
    label: int
    index: int
    id: str


class ClassificationData(ImageData):
    """Images with one class each.

    Args:
        source: An embedded set ("digits": 1,797 real handwritten digits); a path to an image folder
            (`train/CLASS/*.jpg`, `val/CLASS/*.jpg`), to parquet or arrow data, or to a set saved with `save_to_disk`;
            or `hub:owner/name`.
        batch_size: Images per step and device.
        num_workers: Loader processes per device; 0 loads in the training process.
        img_size: Side, or [H, W], of the images given to the model.
        num_classes: How many classes to expect; null takes what the data has.
        val_fraction: Share of the training images held out when the data has no validation split.
        augmentation: Random changes to training images.
        eval_crop: Share of the image side that evaluation keeps: cover `img_size / eval_crop`, then centre crop.
        mean: Mean of each channel, subtracted from images in [0, 1].
        std: Standard deviation of each channel.
        image_column: Column of the images; null finds it.
        label_column: Column of the labels; null finds it.

    Example:
        $ linvit fit --config configs/quickstart.yaml --data.source=path/to/folder --data.img_size=64
    """

    def __init__(
        self,
        source: str = "digits",
        batch_size: int = 64,
        num_workers: int = 2,
        img_size: int | Sequence[int] = 224,
        num_classes: int | None = None,
        val_fraction: float = 0.1,
        augmentation: Augmentation = Augmentation(),  # noqa: B008 (frozen)
        eval_crop: float = 0.875,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        image_column: str | None = None,
        label_column: str | None = None,
    ) -> None:
        super().__init__(batch_size, num_workers, img_size, mean, std)
        if not 0 < eval_crop <= 1:
            raise UserError(f"eval_crop must lie in (0, 1]; got {eval_crop}")
        if not 0 < val_fraction < 1:
            raise UserError(f"val_fraction must lie between 0 and 1; got {val_fraction}")
        self.source = source
        self.expected_classes = num_classes
        self.val_fraction = val_fraction
        self.image_column = image_column
        self.label_column = label_column
        self.train_transform = train_transform(self.size, augmentation, mean, std)
        self.eval_transform = eval_transform(self.size, eval_crop, mean, std)

    @cached_property
    def splits(self) -> dict[str, datasets.Dataset]:
        """The rows of each split that the data has, images and labels in the form that training needs."""
        splits = load_splits(self.source)
        rows = next(iter(splits.values()))
        splits = as_images(splits, self._image_column(rows), self.source)
        label = self._label_column(rows)
        return splits if label is None else as_indices(splits, label, self.source)

    @cached_property
    def columns(self) -> tuple[str, str | None]:
        """Names of the image column and of the label column (None: no labels)."""
        rows = next(iter(self.splits.values()))
        return self._image_column(rows), self._label_column(rows)

    def _image_column(self, rows: datasets.Dataset) -> str:
        found = column(rows, self.image_column, datasets.Image, ["image", "img"], self.source)
        if found is None:
            raise UserError(
                f"data source '{self.source}' has no image column among {', '.join(rows.features)}; "
                f"name it with --data.image_column"
            )
        return found

    def _label_column(self, rows: datasets.Dataset) -> str | None:
        return column(rows, self.label_column, datasets.ClassLabel, ["label", "labels", "fine_label"], self.source)

    @cached_property
    def _halves(self) -> datasets.DatasetDict:
        """The training rows cut in two, always the same way, for data without a validation split."""
        return self.splits["train"].train_test_split(test_size=self.val_fraction, seed=0)

    @property
    def num_classes(self) -> int | None:
        """Number of classes, checked against what the configuration expects; None if the data has no labels.

        Raises:
            UserError: If the data has another number of classes than `num_classes` says.
        """
        label = self.columns[1]
        if label is None:
            return self.expected_classes
        names = self.class_names
        rows = self.splits.get("train", next(iter(self.splits.values())))
        found = max(rows.unique(label)) + 1 if names is None else len(names)
        if self.expected_classes is not None and found != self.expected_classes:
            classes = "" if names is None else f" ({', '.join(names[:10])}{', ...' if found > 10 else ''})"
            raise UserError(
                f"data source '{self.source}' has {found} classes{classes}, but num_classes says "
                f"{self.expected_classes}. Complete the data, or set num_classes: {found}, or leave it out"
            )
        return found

    @property
    def class_names(self) -> list[str] | None:
        """Names of the classes in the order of their indices, if the data has them."""
        label = self.columns[1]
        feature = None if label is None else next(iter(self.splits.values())).features[label]
        return list(feature.names) if isinstance(feature, datasets.ClassLabel) else None

    def setup(self, stage: str) -> None:
        """Makes the sets that a stage needs: fit, validate, test or predict."""
        if stage == "fit":
            self.train_set = self._images("train", self.train_transform)
        if stage in ("fit", "validate"):
            self.val_set = self._images("val", self.eval_transform)
        if stage == "test":
            self.test_set = self._images(self._held_out({*self.splits, "val"}), self.eval_transform)
        if stage == "predict":
            split = self._held_out({*self.splits})
            self.predict_set = Images(self.splits[split], self.eval_transform, self.columns[0], None)

    def _held_out(self, available: set[str]) -> str:
        split = next(name for name in ("test", "val", "train") if name in available)
        if split != "test":
            rank_zero_info(f"data source '{self.source}' has no test split; using its {split} split")
        return split

    def _images(self, split: str, transform: Callable[[Image.Image], Tensor]) -> "Images":
        """A labelled split; without a validation split, train and val are the two halves of train."""
        image, label = self.columns
        if label is None:
            raise UserError(
                f"data source '{self.source}' has no labels, so it can only be predicted (linvit predict). "
                f"Name their column with --data.label_column, or sort the images into one folder per class"
            )
        if split in ("train", "val") and "train" in self.splits and "val" not in self.splits:
            return Images(self._halves["train" if split == "train" else "test"], transform, image, label)
        if split not in self.splits:
            raise UserError(f"data source '{self.source}' has no {split} split; it has: {', '.join(self.splits)}")
        return Images(self.splits[split], transform, image, label)


class Images(Dataset[Sample]):
    """Rows of a `datasets.Dataset` as samples."""

    def __init__(
        self, rows: datasets.Dataset, transform: Callable[[Image.Image], Tensor], image: str, label: str | None
    ) -> None:
        self.rows = rows.cast_column(image, datasets.Image(decode=False))  # decoded here, where the path is at hand
        self.transform = transform
        self.image = image
        self.label = label

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        """Loads, decodes and transforms one image.

        Raises:
            UserError: If the image cannot be decoded; names its file.
        """
        row = self.rows[index]
        stored: dict[str, Any] = row[self.image]  # {"bytes": ..., "path": ...}
        try:
            picture = datasets.Image().decode_example(stored)
        except OSError as error:
            where = stored["path"] or "stored in the table"
            raise UserError(f"image {index} ({where}) cannot be decoded: {error}. Replace or remove it") from error
        sample: Sample = {
            "image": self.transform(to_rgb(picture)),
            "index": index,
            "id": stored["path"] or str(index),
        }
        if self.label is not None:
            sample["label"] = row[self.label]
        return sample


def to_rgb(picture: Image.Image) -> Image.Image:
    """Any image as 8-bit RGB; 16-bit grey values are scaled, which PIL's own conversion would clip to white."""
    if picture.mode.startswith("I"):
        picture = Image.fromarray((np.asarray(picture) / 257).clip(0, 255).astype(np.uint8))
    return picture.convert("RGB")
