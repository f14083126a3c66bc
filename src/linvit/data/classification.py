"""Labelled images: embedded, from disk, or from the hub, through one loading path."""

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar, Literal, get_args

import datasets
import numpy as np
import torch
from torch.utils.data import DataLoader

from linvit.data.base import ImageData, TargetReport
from linvit.data.loading.loader import make_loader
from linvit.data.loading.packs import EvalPackSampler, Packs, PackSampler, check_lengths, collate_pack
from linvit.data.sources.data_source import Splits
from linvit.data.sources.folder import in_folders, naming_tables
from linvit.data.sources.images import Images, Target
from linvit.data.sources.labels import (
    as_indices,
    check_label,
    check_labels,
    check_same_classes,
    check_trained_classes,
    count_classes,
    features_of,
    find_column,
    label_counts,
    places_of,
)
from linvit.data.sources.mask_folders import find_masks
from linvit.data.sources.pairs import has_masks
from linvit.data.sources.scan import ScanResult
from linvit.data.sources.splits import folder_of_images, load_splits
from linvit.data.sources.stream import Stream
from linvit.data.transforms.classification import (
    Augmentation,
    EvalTransform,
    NativeSize,
    NativeTransform,
    TrainTransform,
)
from linvit.data.transforms.geometry import CropMode
from linvit.errors import UserError, check_choice, check_number, quote_first

LABEL_COLUMNS = ("label", "labels", "fine_label")  # usual names of the column


class ClassificationData(ImageData):
    """Images with one class each.

    Args:
        source: An embedded set ("digits"), a path, or `hub:owner/name`; see `ImageData`.
        num_classes: Number of classes to expect; null takes the number in the data.
        label_column: Column of the labels; null finds it.
        classes: "subset" if the data has some of the classes of the network, by name, in `linvit validate` and `test`:
            scores are then those of a choice among these alone.
        labels: Whether images have classes; false takes the images alone, for a task that learns from its teacher.
        augmentation: Random changes to training images.
        crop_mode: How evaluation resizes and crops, in timm's words: center (resize until `img_size / crop_pct` is
            covered, crop the centre), or squash (resize to `img_size / crop_pct` whatever the aspect, crop the centre).
        crop_pct: Fraction of the resized side that evaluation keeps; 1.0 keeps all of it.
        token_budget: Largest number of patches of a batch, of each device. Images then keep their aspect and their own
            size, rounded to whole patches, and are not cropped in evaluation; batches hold as many as fit, and the
            network packs them. null makes batches of `batch_size` images of `img_size`.
        max_tokens: With it, the largest number of patches of an image, to which larger ones are shrunk; null is all.
        patch_size: With it, the side of the network's patches in pixels.
        **data: Arguments of `ImageData`: batches, image size, splits, streaming, bad images.

    Example:
        $ linvit fit --config quickstart --data.source=path/to/folder --data.img_size=64
    """

    train_transform: TrainTransform
    eval_transform: EvalTransform | NativeTransform
    how_to_label: ClassVar[str] = (
        "give each class a folder, train/CLASS/*.jpg (images directly in train/ have no class), or name the column of "
        "labels with --data.label_column"
    )
    how_to_restrict: ClassVar[str] = ". If these are some of them, by name, score them alone: --data.classes=subset"
    advanced_options: ClassVar[frozenset[str]] = ImageData.advanced_options | {
        *("classes", "label_column", "labels", "crop_ratio", "interpolation", "augment_on", "rotate", "translate"),
        *("zoom", "token_budget", "max_tokens", "patch_size"),
    }

    def __init__(
        self,
        source: str = "digits",
        num_classes: int | None = None,
        label_column: str | None = None,
        classes: Literal["all", "subset"] = "all",
        labels: bool = True,
        augmentation: Augmentation = Augmentation(),  # noqa: B008 (frozen)
        crop_mode: CropMode = "center",
        crop_pct: float = 0.875,
        token_budget: int | None = None,
        max_tokens: int | None = None,
        patch_size: int = 16,
        **data: Any,
    ) -> None:
        super().__init__(source, **data)
        check_choice("crop_mode", crop_mode, get_args(CropMode))
        check_number("crop_pct", crop_pct, above=0, at_most=1)
        check_choice("--data.classes", classes, ["all", "subset"])
        self.bands.check_colours({"auto_augment": augmentation.auto_augment, "color_jitter": augmentation.color_jitter})
        self.expected_classes = num_classes
        self.given_label_column = label_column
        self.subset = classes == "subset"
        self.places: Sequence[int] | None = None
        self.labels = labels
        self.data_source.load = partial(load_splits, classes=labels)
        self.token_budget = token_budget
        self.native: NativeSize | None = None
        if token_budget is not None:
            check_number("token_budget", token_budget, at_least=1, whole=True)
            for name, given, only in (("streaming", self.stream_options, None), ("repeated_aug", self.repeated_aug, 1)):
                if given != only:
                    raise UserError(f"token_budget needs the sizes of all images, once each: leave --data.{name} out")
            self.native = NativeSize(patch_size, max_tokens)
        elif max_tokens is not None:
            raise UserError(f"max_tokens={max_tokens} is for --data.token_budget, which is not set")
        self.train_transform = TrainTransform(self.size, augmentation, self.mean, self.native)
        self.eval_transform = (
            EvalTransform(self.size, crop_mode, crop_pct) if self.native is None else NativeTransform(self.native)
        )

    def setup(self, stage: str) -> None:
        """Makes the sets of a stage; with `token_budget` the network must have patches of `patch_size`."""
        super().setup(stage)
        if self.native is None or self.trainer is None:
            return
        task: Any = self.trainer.lightning_module
        if getattr(task, "teacher", None) is not None:
            one_size = "set --data.token_budget=null --data.max_tokens=null"  # a teacher's run may have set both
            raise UserError(f"a teacher is compared on images of one size: {one_size}")
        mixup = getattr(task, "mixup", None)
        if stage == "fit" and mixup is not None and (mixup.mixup_alpha or mixup.cutmix_alpha):
            raise UserError(
                "mixup and CutMix mix images of one size, and batches by --data.token_budget have several: set "
                "--model.mixup_alpha=0 --model.cutmix_alpha=0"
            )
        network: Any = getattr(task, "network", None)
        parts = (network, *(getattr(network, name, None) for name in ("patch_embed", "embeds")))
        found = [getattr(part, "patch_size", self.native.patch) for part in parts]
        own = {side for patch in found for side in (patch if isinstance(patch, tuple) else (patch,))}
        if own != {self.native.patch}:
            side = max(own - {self.native.patch})
            raise UserError(f"the network has patches of {side} pixels; set --data.patch_size={side}")

    def train_dataloader(self) -> DataLoader[Any]:
        """Makes shuffled batches, of `batch_size` images or of `token_budget` tokens."""
        if self.native is None or not isinstance(self.train_set, Images):
            return super().train_dataloader()
        lengths, budget = self._lengths(self.train_set)
        sampler = PackSampler(lengths, budget, self._seed, *self._rank_and_world)
        return make_loader(
            Packs(self.train_set), 1, self.num_workers, partial(collate_pack, self.collate), sampler, training=True
        )

    def _in_order(self, samples: Images | Stream) -> DataLoader[Any]:
        if self.native is None or not isinstance(samples, Images):
            return super()._in_order(samples)
        sampler = EvalPackSampler(*self._lengths(samples), *self._rank_and_world)
        return make_loader(Packs(samples), 1, self.num_workers, partial(collate_pack, self.collate), sampler)

    def _lengths(self, samples: Images) -> tuple[np.ndarray, int]:
        """Tokens of each image, by the headers of the files, and of a batch."""
        assert self.native is not None
        assert self.token_budget is not None
        lengths = np.array([self.native.tokens(*size) for size in samples.sizes()])
        check_lengths(lengths, self.token_budget)
        return lengths, self.token_budget

    @cached_property
    def label_column(self) -> str | None:
        """Name of the column of labels, or None if there is none."""
        if not self.labels:
            return None
        features = features_of(self.data_source.tables)
        return find_column(features, self.given_label_column, datasets.ClassLabel, LABEL_COLUMNS, self.source)

    @property
    def labelled(self) -> Splits:
        """The splits that have labels."""
        return {name: rows for name, rows in self.splits.items() if self.label_column in rows.features}

    @cached_property
    def num_classes(self) -> int | None:
        """Number of classes, None without labels; a `UserError` if the configuration expects another."""
        if self.label_column is None:
            return self.expected_classes if self.labels else 0
        if self.class_names is None and self.data_source.streaming:
            if self.expected_classes is None:
                raise UserError(
                    f"the labels of '{self.source}' have no names and are not read beforehand; set --data.num_classes"
                )
            return self.expected_classes
        return count_classes(self.labelled, self.label_column, self.expected_classes, self.source)

    @cached_property
    def class_names(self) -> list[str] | None:
        """Names of the classes in the order of their indices, if the data has them."""
        feature = None if self.label_column is None else features_of(self.labelled)[self.label_column]
        return list(feature.names) if isinstance(feature, datasets.ClassLabel) else None

    def prepare(self, splits: Splits) -> Splits:
        """Returns the splits with labels as numbers."""
        label = self.label_column
        labelled = {name: rows for name, rows in splits.items() if label in rows.features}
        if label is None:
            return splits
        check_same_classes(labelled, label, self.source)
        if not self.data_source.streaming:
            return splits | as_indices(labelled, label, self.source)
        kind = getattr(features_of(labelled)[label], "dtype", "no value")
        if not kind.startswith(("int", "uint")):  # words can only be numbered by one who has seen them all
            raise UserError(
                f"column '{label}' of data source '{self.source}' ({kind}) holds no class indices, which streaming "
                f"needs; name another one with --data.label_column, or leave out --data.streaming"
            )
        return splits

    def targets(self, split: str) -> Mapping[str, Target]:
        """Returns the labels of a split, checked beforehand unless it is streamed."""
        label = self.label_column
        if self.masks_found:
            way = "Name the folder of its images alone, or masks are taken for images"
            if self.labels:
                way = f"Check them with linvit data check {self.source} --data=SegmentationData --data.num_classes=N"
                way += "" if label is None else f". If they are classes, set --data.num_classes={self.num_classes}"
            raise UserError(f"'{self.source}' looks like a segmentation dataset: {self.masks_found}. {way}")
        if not self.labels:
            return {}
        if label is None or (split in self.splits and split not in self.labelled):
            whose = "" if label is None else f"the {split} split of "
            others = ", ".join(name for name in features_of(self.splits) if name != self.image_column)
            tables = self.unread_tables
            named = f". Tables that are not read name the images: {quote_first(tables)}" if tables else ""
            raise UserError(
                f"{whose}data source '{self.source}' has no labels, so it can only be predicted (linvit predict). Name "
                f"their column with --data.label_column (it has: {others or 'none but that of images'}), or sort the "
                f"images into one folder per class, at least two, such as {split}/CLASS/*.jpg: images directly in "
                f"{split}/ have no class, unless {split}/metadata.csv, with the columns file_name and label, gives it. "
                f"Folders in archives are no classes; unpack them{named}"
            )
        table = self.data_source.table_of(split)
        if table in self.splits and not self.data_source.streaming:
            rows = self.splits[table]
            check_labels(rows, self.image_column, label, self.num_classes or 0, table, self.source)
        reader = partial(check_label, num_classes=self.num_classes, source=self.source, places=self.places)
        return {"label": Target(label, reader)}

    @cached_property
    def masks_found(self) -> str:
        """Says which masks are taken for classes or images; "" for none, or if `num_classes` is given."""
        if self.expected_classes is not None:
            return ""
        if has_masks(self.source):
            return "it has folders of images and masks"
        rows = self.splits.get("train") if folder_of_images(self.source) else None
        found = None if rows is None else find_masks(rows, self.image_column, self.images)
        move = "Put them into folders called images and masks, as in train/images and train/masks"
        return f"'{found[1]}' is a mask of '{found[0]}'. {move}" if found else ""

    @cached_property
    def unread_tables(self) -> list[str]:
        """Paths of tables in the folder that name its images but are not read."""
        folder = folder_of_images(self.source)
        return [] if folder is None else naming_tables(folder)

    def restrict_to(self, classes: Sequence[str]) -> None:
        """Finds the classes by name; see `ImageData.restrict_to`."""
        if not self.class_names:
            raise UserError(f"the classes of '{self.source}' have no names, by which --data.classes=subset finds them")
        self.places = places_of(self.class_names, classes, self.source)

    def finish(self, batch: dict[str, Any]) -> None:
        """Adds the numbers of the `classes` (K') of a subset; see `ImageData.finish`."""
        super().finish(batch)
        if self.places is not None:
            batch["classes"] = torch.tensor(self.places, device=batch["image"].device)

    def check_training(self) -> None:
        """Warns of trained classes without validation images; the labels of a stream are not known beforehand."""
        if self.data_source.streaming or self.label_column is None:
            return
        classes = self.class_names or [str(index) for index in range(self.num_classes or 0)]
        check_trained_classes(self.labelled, self.label_column, classes, self.source)

    def check_targets(self, found: ScanResult, workers: int) -> TargetReport:
        """Looks at all labels; see `ImageData.check_targets`."""
        classes = "no labels" if self.label_column is None else f"{self.num_classes} classes"
        lines, refused = [f"{self.source}: {found.images.total():,} images, {classes}"], []
        for split, rows in self.splits.items():
            each = ", no labels" if self.labelled else ""
            if self.label_column is not None and split in self.labelled:
                each = f", {label_counts(rows, self.label_column, self.num_classes or 0)}"
                try:
                    check_labels(rows, self.image_column, self.label_column, self.num_classes or 0, split, self.source)
                except UserError as error:
                    refused.append(f"  BAD LABELS  {error}")
            lines.append(f"  {split:<10}{found.images[split]:>12,} images{each}")
        first = next(iter(self.splits.values()))
        packed = "__key__" in first.features and "/" in first[0]["__key__"]  # of a tar file
        said = features_of(self.splits).keys() - {self.image_column, "__key__", "__url__"}  # of the images
        asked = said or len(self.splits) > 1 or self.expected_classes is not None or self.unread_tables
        if self.labelled and self.unread_tables:
            lines.append(f"  WARNING: tables that name images are not read: {quote_first(self.unread_tables)}")
        folder = folder_of_images(self.source)
        trainable = asked or packed or (folder and in_folders(folder)) or self.masks_found  # others are to be predicted
        return TargetReport([*lines, *found.lines()], refused=refused, trainable=bool(trainable))
