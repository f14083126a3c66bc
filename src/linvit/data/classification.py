"""Labelled images: embedded, from disk, or from the hub, through one loading path."""

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

import datasets
import numpy as np
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from linvit.data.base import IMAGENET_MEAN, IMAGENET_STD, ImageData
from linvit.data.sources.bad_images import MAX_PIXELS, BadImages, Policy
from linvit.data.sources.columns import as_images, as_indices, column, features_of
from linvit.data.sources.images import Images, Sample
from linvit.data.sources.labels import check_labels, check_model_classes, check_same_classes, check_trained_classes
from linvit.data.sources.shards import Shards, load_streams
from linvit.data.sources.splits import hold_out, load_splits
from linvit.data.sources.stream import Stream
from linvit.data.sources.stream_checks import check_stream_labels, check_stream_options, stream_classes
from linvit.data.transforms.classification import Augmentation, EvalTransform, TrainTransform
from linvit.data.transforms.geometry import CropMode
from linvit.errors import UserError, check_choice


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
        val_fraction: Fraction of the training images held out when the data has no validation split.
        augmentation: Random changes to training images.
        repeated_aug: How often each image of an epoch is used, augmented differently each time. Epochs keep their
            length, so each has 1 / repeated_aug of the images (DeiT: 3).
        crop_mode: How evaluation resizes and crops, in timm's words: center (resize until `img_size / crop_pct` is
            covered, crop the centre), squash (resize to `img_size / crop_pct` whatever the aspect, crop the centre), or
            border (resize until the image fits into `img_size / crop_pct`, pad with the mean colour).
        crop_pct: Fraction of the resized side that evaluation keeps; 1.0 keeps all of it.
        mean: Mean of each channel, subtracted from images in [0, 1].
        std: Standard deviation of each channel.
        image_column: Column of the images; null finds it.
        label_column: Column of the labels; null finds it.
        streaming: Read parquet, arrow or tar files or a hub set from one end to the other instead of at random.
        streaming_rows: Training rows of a stream whose files do not tell; parquet and arrow files do.
        shuffle_buffer: Undecoded images that each loader process of a stream holds, to choose from at random.
        bad_images: skip puts another image in the place of a training image that cannot be decoded, raise ends the run.
            Evaluation always raises.
        max_bad_fraction: Largest fraction of the training images that is skipped (5 are always allowed).
        max_pixels: Images with more are refused before they are decoded.
        seed: Of the order of images and of all augmentation; null is `seed_everything`.

    Example:
        $ linvit fit --config quickstart --data.source=path/to/folder --data.img_size=64
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
        repeated_aug: int = 1,
        crop_mode: CropMode = "center",
        crop_pct: float = 0.875,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        image_column: str | None = None,
        label_column: str | None = None,
        streaming: bool = False,
        streaming_rows: int | None = None,
        shuffle_buffer: int = 1000,
        bad_images: Policy = "skip",
        max_bad_fraction: float = 0.001,
        max_pixels: int = MAX_PIXELS,
        seed: int | None = None,
    ) -> None:
        super().__init__(batch_size, num_workers, img_size, mean, std, seed, repeated_aug)
        check_choice("crop_mode", crop_mode, ["center", "squash", "border"])
        if not 0 < crop_pct <= 1:
            raise UserError(f"crop_pct must lie in (0, 1]; got {crop_pct}")
        if not 0 < val_fraction < 1:
            raise UserError(f"val_fraction must lie between 0 and 1; got {val_fraction}")
        self.source = source
        self.expected_classes = num_classes
        self.val_fraction = val_fraction
        self.image_column = image_column
        self.label_column = label_column
        self.stream_options = check_stream_options(streaming, streaming_rows, shuffle_buffer, repeated_aug)
        self.bad_images = BadImages(bad_images, max_bad_fraction, max_pixels, num_workers)
        self.strict = BadImages("raise", max_pixels=max_pixels)
        self.train_transform = TrainTransform(self.size, augmentation, mean)
        self.eval_transform = EvalTransform(self.size, crop_mode, crop_pct, mean)

    @cached_property
    def splits(self) -> dict[str, datasets.Dataset]:
        """The rows of each split that the data has, images and labels in the form that training needs."""
        streams = self.stream_options is not None
        splits = {name: part.rows for name, part in self._shards.items()} if streams else load_splits(self.source)
        splits = as_images(splits, self._image_column(splits), self.source)
        label = self._label_column(splits)
        if label is None:
            return splits
        labelled = {name: rows for name, rows in splits.items() if label in rows.features}
        check_same_classes(labelled, label, self.source)
        indices = check_stream_labels if streams else as_indices
        return splits | indices(labelled, label, self.source)

    @cached_property
    def _shards(self) -> dict[str, Shards]:
        return load_streams(self.source)

    @cached_property
    def columns(self) -> tuple[str, str | None]:
        """Names of the image column and of the label column (None: no labels)."""
        return self._image_column(self.splits), self._label_column(self.splits)

    @property
    def labelled(self) -> dict[str, datasets.Dataset]:
        """The splits that have labels."""
        label = self.columns[1]
        return {name: rows for name, rows in self.splits.items() if label in rows.features}

    def _image_column(self, splits: dict[str, datasets.Dataset]) -> str:
        features = features_of(splits)
        found = column(features, self.image_column, datasets.Image, ["image", "img"], self.source)
        if found is None:
            raise UserError(
                f"data source '{self.source}' has no image column among {', '.join(features)}; "
                f"name it with --data.image_column"
            )
        return found

    def _label_column(self, splits: dict[str, datasets.Dataset]) -> str | None:
        return column(
            features_of(splits), self.label_column, datasets.ClassLabel, ["label", "labels", "fine_label"], self.source
        )

    @cached_property
    def _halves(self) -> dict[str, np.ndarray]:
        """Numbers of the training rows in two parts, for data without a validation split."""
        return hold_out(len(self.splits["train"]), self.val_fraction, self.source)

    @cached_property
    def num_classes(self) -> int | None:
        """Number of classes, checked against what the configuration expects; None if the data has no labels.

        Raises:
            UserError: If the data has another number of classes than `num_classes` says.
        """
        label = self.columns[1]
        if label is None:
            return self.expected_classes
        names = self.class_names
        rows = self.labelled.get("train", next(iter(self.labelled.values())))
        if names is None and self.stream_options is not None:
            return stream_classes(self.expected_classes, self.source)
        found = max(value for value in rows.unique(label) if value is not None) + 1 if names is None else len(names)
        if self.expected_classes is not None and found != self.expected_classes:
            classes = "" if names is None else f" ({', '.join(names[:10])}{', ...' if found > 10 else ''})"
            raise UserError(
                f"data source '{self.source}' has {found} classes{classes}, but num_classes says "
                f"{self.expected_classes}. Complete the data, or set --data.num_classes={found}, or null to take what "
                f"it has"
            )
        return found

    @cached_property
    def class_names(self) -> list[str] | None:
        """Names of the classes in the order of their indices, if the data has them."""
        label = self.columns[1]
        feature = None if label is None else next(iter(self.labelled.values())).features[label]
        return list(feature.names) if isinstance(feature, datasets.ClassLabel) else None

    def setup(self, stage: str) -> None:
        """Makes the sets that a stage needs: fit, validate, test or predict."""
        if self.trainer is not None and stage != "predict":
            model = self.trainer.lightning_module.hparams.get("num_classes")
            check_model_classes(model, self.num_classes, self.source)
        if stage == "fit":
            folder = None if self.trainer is None else self.trainer.log_dir
            self.bad_images.report = Path(folder) / "bad_images.csv" if folder else None
            self.train_set = self._images("train", self.train_transform)
            rank_zero_info(f"data source '{self.source}' has {self.num_classes} classes")
        if stage in ("fit", "validate"):
            self.val_set = self._images("val", self.eval_transform)
        if stage == "fit":
            self._check_classes()
        if stage == "test":
            self.test_set = self._images(self._held_out({*self.splits, "val"}), self.eval_transform)
        if stage == "predict":
            split = self._held_out({*self.splits})
            self.predict_set = self._set(split, self.splits[split], self.eval_transform, None)

    def _check_classes(self) -> None:
        """Warns of trained classes without validation images; the labels of a stream are not known beforehand.

        Raises:
            UserError: If a class has images of other splits, but none of training.
        """
        label = self.columns[1]
        if label is None or self.stream_options is not None:
            return
        classes = self.class_names or [str(index) for index in range(self.num_classes or 0)]
        doubt = check_trained_classes(self.labelled, label, classes, self.source)
        if doubt:
            rank_zero_warn(doubt)

    def _held_out(self, available: set[str]) -> str:
        split = next(name for name in ("test", "val", "train") if name in available)
        if split != "test":
            rank_zero_info(f"data source '{self.source}' has no test split; using its {split} split")
        return split

    def _images(self, split: str, transform: Callable[[Tensor, int], Sample]) -> Images | Stream:
        """A labelled split; without a validation split, train and val are the two halves of train."""
        label = self.columns[1]
        if label is None or (split in self.splits and split not in self.labelled):
            whose = "" if label is None else f"the {split} split of "
            raise UserError(
                f"{whose}data source '{self.source}' has no labels, so it can only be predicted (linvit predict). Name "
                f"their column with --data.label_column, or sort the images into one folder per class, such as "
                f"{split}/CLASS/*.jpg: images directly in {split}/ have no class"
            )
        streams = self.stream_options is not None
        if split in ("train", "val") and "train" in self.splits and "val" not in self.splits and not streams:
            if split == "val":
                rank_zero_info(
                    f"data source '{self.source}' has no validation split; a fraction of {self.val_fraction} of its "
                    f"train split is held out (--data.val_fraction)"
                )
            return self._set(split, self.splits["train"], transform, label, self._halves[split])
        if split not in self.splits:
            way = "; a stream is not cut in two: add one, or set --data.streaming=false" if streams else ""
            raise UserError(f"data source '{self.source}' has no {split} split; it has: {', '.join(self.splits)}{way}")
        return self._set(split, self.splits[split], transform, label)

    def _set(
        self,
        split: str,
        rows: datasets.Dataset | datasets.IterableDataset,
        transform: Callable[[Tensor, int], Sample],
        label: str | None,
        chosen: np.ndarray | None = None,
    ) -> Images | Stream:
        """Rows as samples, their labels checked; images of training alone may be skipped."""
        image, training = self.columns[0], transform is self.train_transform
        if image not in rows.features:
            raise UserError(
                f"the {split} split of data source '{self.source}' has no column '{image}', where the others have "
                f"their images; it has: {', '.join(rows.features)}. Rename its column"
            )
        bad = self.bad_images if training else self.strict
        if self.stream_options is None:
            if label is not None:
                table = split if split in self.splits else "train"  # without a validation split, that is cut in two
                check_labels(self.splits[table], image, label, self.num_classes or 0, table, self.source)
            return Images(rows, transform, image, label, bad, chosen)
        shards = self._shards[split]._replace(rows=rows)
        shared = (self.batch_size, self.num_workers, *self._place, bad, self.source)
        classes = None if label is None else self.num_classes
        seed = self._seed if training else None
        return Stream(shards, transform, image, label, classes, *shared, seed, *self.stream_options)
