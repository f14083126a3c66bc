"""Images whose pixels have classes: embedded, from folders, tables or the hub, through one loading path."""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar

import datasets

from linvit.data.base import ImageData, TargetReport
from linvit.data.sources.data_source import Splits
from linvit.data.sources.images import Target
from linvit.data.sources.labels import as_images, features_of, find_column, read_names, undecoded
from linvit.data.sources.masks import MaskReader, Masks, as_value, propose_classes
from linvit.data.sources.pairs import has_masks, load_pairs
from linvit.data.sources.scan import ScanResult
from linvit.data.sources.scenes import CLASSES, Scenes, SceneSource
from linvit.data.sources.splits import SCENES as DIGIT_SCENES
from linvit.data.sources.splits import table_features
from linvit.data.transforms.segmentation import (
    EvalTransform,
    SegmentationAugmentation,
    TrainTransform,
    check_resize_limits,
)
from linvit.errors import UserError, check_number

MASK_COLUMNS = (
    "mask",
    "annotation",
    "segmentation_mask",
    "label",
    "labels",
    "segmentation",
)  # usual names of the column


class SegmentationData(ImageData):
    """Images with a mask each, which says the class of every pixel; 255 is ignored.

    Samples have `image` and `mask`, 8-bit (H, W). Training crops both to `img_size`. Evaluation resizes the image
    alone, so that scores are those of the original labels; batches hold lists where sizes differ.

    Args:
        source: "digit_scenes", scenes of the size `img_size` made of real handwritten digits; a folder of images and
            masks: `images/training` and `annotations/training` (ADE20K), `train/images` and `train/masks`, `train` and
            `trainannot` or `train_labels` (CamVid), or `images` and `masks`; parquet, arrow or `hub:owner/name` with a
            column of images and one of masks. See `ImageData`.
        img_size: Side, or [H, W], of the training crops.
        num_classes: How many classes there are; null takes the number of `class_names`, or else of `mask_values`.
        class_names: A list, a file with a name per line, or "ade20k"; null where the names are unknown.
        reduce_zero_label: Whether masks count the classes from 1, and 0 is for pixels without a class, as in ADE20K: 0
            becomes 255, which is ignored, and all others one less. It is applied once, to all splits.
        mask_values: Value of each class in the masks: numbers, or colours [red, green, blue]; null counts from 0.
        ignored_values: Further numbers or colours in the masks that belong to no class.
        mask_column: Column of the masks; null finds it.
        mask_suffix: What names of masks have after that of their image, such as "_mask" in "7_mask.png" of "7.jpg".
        resize_limits: Longest long side and longest short side of a resized image, which keeps its aspect, such as
            ADE20K's [2048, 512]; null leaves the size.
        multiple: Evaluated images are resized once more, to the next multiples of this; PVT's program has 32.
        augmentation: Random changes to training images.
        scenes: What `digit_scenes` is like.
        **data: Arguments of `ImageData`: batches, splits, streaming, bad images.

    Example:
        $ linvit fit --config segmentation_quickstart --data.source=path/to/folder --data.class_names=names.txt
    """

    train_transform: TrainTransform
    eval_transform: EvalTransform
    list_keys: ClassVar[tuple[str, ...]] = ("size",)
    how_to_label: ClassVar[str] = (
        "put masks of the same names beside the images, as in train/images and train/masks, or name the column of "
        "masks with --data.mask_column"
    )
    how_to_count: ClassVar[str | None] = "set --data.num_classes, or --data.class_names to a file with a name per line"
    advanced_options: ClassVar[frozenset[str]] = ImageData.advanced_options | {
        *("mask_column", "mask_suffix", "mask_values", "ignored_values", "multiple", "augment_on")
    }

    check_defaults: ClassVar[Mapping[str, Any]] = {"augmentation.photometric": False}  # for images of any bands

    def __init__(
        self,
        source: str = DIGIT_SCENES,
        img_size: int | Sequence[int] = 512,
        num_classes: int | None = None,
        class_names: list[str] | str | None = None,
        reduce_zero_label: bool = False,
        mask_values: list[int | list[int]] | None = None,
        ignored_values: list[int | list[int]] | None = None,
        mask_column: str | None = None,
        mask_suffix: str = "",
        resize_limits: tuple[int, int] | None = None,
        multiple: int = 1,
        augmentation: SegmentationAugmentation = SegmentationAugmentation(),  # noqa: B008 (frozen)
        scenes: Scenes = Scenes(),  # noqa: B008
        **data: Any,
    ) -> None:
        super().__init__(source, img_size=img_size, **data)
        check_resize_limits(resize_limits)
        check_number("multiple", multiple, at_least=1, whole=True)
        self.bands.check_colours({"photometric": augmentation.photometric})
        self.given_classes = num_classes
        self.given_names = class_names
        self.given_mask_column = mask_column
        self.reduce_zero_label = reduce_zero_label
        self.mask_values = mask_values
        self.ignored_values = ignored_values or []
        self.train_transform = TrainTransform(self.size, resize_limits, augmentation)
        self.eval_transform = EvalTransform(resize_limits, multiple)
        if source == DIGIT_SCENES:
            self.data_source = SceneSource(self.images, scenes, self.size)
        else:
            self.data_source.load = partial(load_pairs, mask_suffix=mask_suffix)

    @cached_property
    def class_names(self) -> list[str] | None:
        """Names of the classes in the order of their indices, if they are known."""
        if isinstance(self.data_source, SceneSource):
            return CLASSES
        names = read_names(self.given_names) if isinstance(self.given_names, str) else self.given_names
        if names is not None and self.given_classes not in (None, len(names)):
            raise UserError(
                f"class_names has {len(names)} names, but num_classes says {self.given_classes}; leave one of them "
                f"out, as with --data.class_names=null"
            )
        return names

    @property
    def num_classes(self) -> int | None:
        """Number of classes, or None if nothing says it."""
        if self.class_names is not None:
            return len(self.class_names)
        return self.given_classes if self.mask_values is None else self.given_classes or len(self.mask_values)

    @cached_property
    def mask_column(self) -> str | None:
        """Name of the column of masks, or None if there is none."""
        if isinstance(self.data_source, SceneSource):
            return "scene"
        features = features_of(self.data_source.tables)
        no_files = re.compile("u?int|float|bool")
        others = {
            name: kind
            for name, kind in features.items()
            if name != self.image_column and not no_files.match(getattr(kind, "dtype", ""))
        }
        return find_column(others, self.given_mask_column, datasets.Image, MASK_COLUMNS, self.source)

    def prepare(self, splits: Splits) -> Splits:
        """Returns the splits with masks as files."""
        mask = self.mask_column
        return splits if mask is None else splits | as_images(splits, mask, self.source)

    def targets(self, split: str) -> Mapping[str, Target]:
        """Returns the masks of a split."""
        table = self.data_source.table_of(split)
        mask = self.mask_column
        if mask is None or (table in self.splits and mask not in self.splits[table].features):
            raise UserError(
                f"the {split} split of data source '{self.source}' has no masks, so it can only be predicted (linvit "
                f"predict): {self.how_to_label}"
            )
        reader = self.mask_reader
        if table in self.splits and not self.data_source.streaming and not isinstance(self.data_source, SceneSource):
            self.masks(self.splits[table]).check(self.class_names, table, self.source)
        return {"mask": Target(mask, reader)}

    def masks(self, rows: datasets.Dataset) -> Masks:
        """Returns the masks of a split, to be checked; the split must have masks."""
        return Masks(rows, self.image_column, self.mask_column or "", self.mask_reader)

    @cached_property
    def mask_reader(self) -> MaskReader:
        """Masks as classes."""
        if self.num_classes is None:
            mask, rows = self.mask_column or "", next(iter(self.splits.values()))
            known = not self.data_source.streaming and mask in rows.features
            found = propose_classes(undecoded(rows, mask), mask, self.images) if known else ""
            raise UserError(
                f"data source '{self.source}' does not say how many classes it has; {self.how_to_count}{found}"
            )
        values = None if self.mask_values is None else [as_value(value) for value in self.mask_values]
        ignored = [as_value(value) for value in self.ignored_values]
        return MaskReader(self.num_classes, self.reduce_zero_label, values, ignored, self.data_source.images)

    @classmethod
    def recognises(cls, source: str) -> bool:
        """True for a folder of images and masks, and for a table with a column of masks."""
        features = table_features(source)
        classes = any(isinstance(kind, datasets.ClassLabel) for kind in features.values())
        kinds = [features[name] for name in MASK_COLUMNS if name in features]
        files = {"bytes", "path"}  # of a table that another program has written
        masks = any(isinstance(kind, datasets.Image) or (isinstance(kind, dict) and {*kind} == files) for kind in kinds)
        return has_masks(source) or (masks and not classes)

    def check_targets(self, found: ScanResult, workers: int) -> TargetReport:
        """Looks at all masks; see `ImageData.check_targets`."""
        names = self.class_names or [str(index) for index in range(self.num_classes or 0)]
        lines, bad = [f"{self.source}: {self.num_classes} classes"], []
        for split, rows in self.splits.items():
            if self.mask_column not in rows.features:
                lines.append(f"  {split:<10}no masks")
                continue
            described, findings = self.masks(rows).describe(split, names, workers)
            lines += described
            bad += findings
        return TargetReport(lines, bad)
