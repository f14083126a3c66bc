"""Images with objects, each with a box, a class and perhaps a mask: embedded, from COCO's files, tables or the hub."""

import math
from collections.abc import Mapping, Sequence
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import datasets
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only, rank_zero_warn
from torch import Tensor
from torchvision.utils import draw_bounding_boxes

from linvit.data.base import ImageData
from linvit.data.loading.sampler import GroupedSampler, TrainSampler
from linvit.data.sources.class_names import read_names
from linvit.data.sources.coco_json import Finding
from linvit.data.sources.columns import features_of
from linvit.data.sources.images import Images, Sample, Target
from linvit.data.sources.labels import check_model_classes
from linvit.data.sources.object_check import ObjectAudit, annotation_name, check_all_occur, class_table, describe
from linvit.data.sources.object_source import Classes, ObjectSource
from linvit.data.sources.objects import as_it_is, object_targets
from linvit.data.sources.scene_source import SceneSource
from linvit.data.sources.scenes import CLASSES, Scenes
from linvit.data.sources.splits import SCENES as DIGIT_SCENES
from linvit.data.transforms.detection import DetectionAugmentation, EvalTransform, TrainTransform
from linvit.errors import UserError
from linvit.plain_text import CsvWriter

TABLE = 100  # classes of which the log has the table


class DetectionData(ImageData):
    """Images with objects: boxes x1, y1, x2, y2 in pixels, classes 0 to K - 1, and masks if they are asked for.

    Batches hold lists. In training: `image` (3, h, w), normalised, of several sizes; of each image there `boxes`
    (n, 4), `labels` (n,) and with `masks` 8-bit masks (n, h, w), without crowds and boxes without area; n may be 0. In
    evaluation: `image`, and the truth at the original size, crowds included, on the CPU: `boxes` in float64, `labels`,
    `iscrowd`, `area` as COCO counts it, and with `masks` `rles`, COCO's run-length encoded masks. In both: `index`,
    `id` (the path), `size`, the original (H, W), and `image_id`, COCO's number of the image.

    Args:
        source: "digit_scenes", scenes of the size `img_size` made of real handwritten digits; a folder with COCO's
            files, such as `annotations/instances_train2017.json` beside `train2017`, or a file of that kind in each
            folder of images; parquet, arrow or `hub:owner/name` with a column of images and one of objects (`bbox`,
            `category`). See `ImageData`.
        img_size: Side, or [H, W], for which the model's tables of positions are made, and size of the scenes.
        masks: Whether objects have masks, as instance segmentation needs them.
        class_names: The classes that are used, a list or a file with a name per line; null is all. Labels count them
            in the order of their ids. Of numbered categories without names, all names.
        empty_classes: Whether classes may have no training object.
        annotation_files: COCO's files of train, val and test, if they are not found.
        image_folders: Likewise, the folders of their images.
        object_column: Column of the objects in a table; null finds it.
        box_format: Of the boxes: xywh, the upper left corner and the size, as COCO has them, or xyxy, two corners.
        limits: Longest long side and longest short side of a resized image, which keeps its aspect, such as COCO's
            [1333, 800]; null leaves the size.
        augmentation: Random changes to training images.
        group_by_aspect: Whether training batches are of images wider than high, or of others.
        skip_bad_annotations: Leave out malformed annotations, up to `max_bad_fraction` of a split; false refuses them.
        drop_empty: Whether training leaves out images without any annotation.
        min_side: Training leaves out images with a shorter side.
        scenes: What `digit_scenes` is like.
        **data: Arguments of `ImageData`: batches, splits, bad images.

    Example:
        $ linvit fit --config detection_quickstart --data.source=path/to/coco
    """

    train_transform: TrainTransform
    eval_transform: EvalTransform
    data_source: ObjectSource | SceneSource
    ragged: ClassVar[tuple[str, ...]] = ("image", "masks", "size", "image_id")
    held: ClassVar[tuple[str, ...]] = ("boxes", "labels", "iscrowd", "area", "rles")
    advanced_options: ClassVar[frozenset[str]] = ImageData.advanced_options | {
        *("object_column", "box_format", "annotation_files", "image_folders", "empty_classes"),
        *("group_by_aspect", "drop_empty", "min_side", "streaming"),
    }

    def __init__(
        self,
        source: str = DIGIT_SCENES,
        img_size: int | Sequence[int] = 224,
        masks: bool = False,
        class_names: list[str] | str | None = None,
        empty_classes: bool = False,
        annotation_files: dict[str, str] | None = None,
        image_folders: dict[str, str] | None = None,
        object_column: str | None = None,
        box_format: Literal["xywh", "xyxy"] = "xywh",
        limits: tuple[int, int] | None = None,
        augmentation: DetectionAugmentation = DetectionAugmentation(),  # noqa: B008 (frozen)
        group_by_aspect: bool = True,
        skip_bad_annotations: bool = False,
        drop_empty: bool = True,
        min_side: int = 32,
        scenes: Scenes = Scenes(),  # noqa: B008
        **data: Any,
    ) -> None:
        super().__init__(source, img_size=img_size, **data)
        if limits is not None and not limits[0] >= limits[1] > 0:
            raise UserError(f"limits must be [longer side, shorter side] in pixels, above 0; got {list(limits)}")
        if self.stream_options is not None:
            raise UserError("detection does not stream, since batches go by aspect: set --data.streaming=false")
        self.masks = masks
        self.empty_classes = empty_classes
        self.limits = limits
        self.group_by_aspect = group_by_aspect
        self.skip_bad_annotations = skip_bad_annotations
        self.skipped: dict[str, list[Finding]] = {}
        self.drop_empty = drop_empty
        self.min_side = min_side
        self.train_transform = TrainTransform(limits, augmentation, masks)
        self.eval_transform = EvalTransform(limits, masks)
        if source == DIGIT_SCENES:
            self.data_source = SceneSource(scenes, self.size)
            return
        names = read_names(class_names) if isinstance(class_names, str) else class_names
        found = (annotation_files, image_folders, object_column, box_format, names, masks)
        self.data_source = ObjectSource(source, data.get("image_column"), self.val_fraction, *found)

    @cached_property
    def classes(self) -> Classes:
        """The classes in the order of their labels."""
        if isinstance(self.data_source, SceneSource):
            return Classes(CLASSES[1:], [*range(10)])
        return self.data_source.classes

    @property
    def class_names(self) -> list[str]:
        """Names of the classes in the order of their labels."""
        return self.classes.names

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.classes.names)

    @property
    def category_ids(self) -> list[int] | None:
        """COCO's ids of the classes, in the order of their labels: those of the data, or from 1 on where it has words.

        None where images elsewhere are predicted and the source does not exist any more.
        """
        try:
            ids = self.classes.ids
        except UserError:
            if self.predict_source is None:
                raise
            return None
        return [*range(1, len(ids) + 1)] if any(isinstance(key, str) for key in ids) else ids

    def targets(self, split: str) -> Mapping[str, Target]:
        """The objects of a split, which are looked at.

        Raises:
            UserError: If it has none, or some are malformed.
        """
        source = self.data_source
        if isinstance(source, SceneSource):
            return {name: Target("scene", as_it_is) for name in ("objects", "image_id")}
        table = split if split in source.splits else "train"  # without a validation split, a part of train is held out
        if table not in source.splits:
            return {}  # which has its own message
        features = source.splits[table].features
        if source.column is None or source.column.name not in features or not self.counts(table).any():
            raise UserError(
                f"the {split} split of data source '{source.name}' has no objects, so it can only be predicted (linvit "
                f"predict): put COCO's annotations beside the images, or name the column with --data.object_column"
            )
        return object_targets(source.column, features)

    def predicted_targets(self) -> Mapping[str, Target]:
        """COCO's numbers of the images, which its results need."""
        column = "scene" if isinstance(self.data_source, SceneSource) else "image_id"
        known = self.predict_source is None and column in features_of(self.splits)
        return {"image_id": Target(column, as_it_is)} if known else {}

    @cache  # noqa: B019 (a data module lives as long as its run)
    def counts(self, split: str) -> np.ndarray:
        """How many objects each class has in a split of a source that is no scenes, int (K,); all are looked at first.

        Raises:
            UserError: If some are malformed, and may not be skipped.
        """
        found = self.audit(split)
        self._check_malformed(found, split)
        if found.wrong_format is not None:
            raise UserError(f"the {split} split of '{self.source}': {found.wrong_format}")
        if found.untrained and split == "train":
            which = "; ".join(describe(found.untrained, partial(self.name_of, split)))
            rank_zero_warn(f"{len(found.untrained)} objects of '{self.source}' are left out of training: {which}")
        return found.counts

    @cache  # noqa: B019
    def audit(self, split: str) -> ObjectAudit:
        """What there is to say about the objects of a split of a source that is no scenes."""
        assert isinstance(self.data_source, ObjectSource)
        return self.data_source.audit(split, self.sizes(split))

    def name_of(self, split: str, row: int) -> str:
        """What messages call the image of a row of a source that is no scenes."""
        assert isinstance(self.data_source, ObjectSource)
        return self.data_source.name_of(self.splits[split], row)

    def _check_malformed(self, found: ObjectAudit, split: str) -> None:
        if not found.malformed:
            return
        bad, allowed = len(found.malformed), self.bad_images.allowed_of(found.total)
        which = "; ".join(describe(found.malformed, partial(self.name_of, split)))
        said = (
            f"{bad:,} of the {found.total:,} annotations in the {split} split of '{self.source}' are malformed: {which}"
        )
        if self.skip_bad_annotations and bad <= allowed:
            self.skipped[split] = found.malformed
            rank_zero_warn(f"{said}. They are left out; bad_annotations.csv in the run's folder lists them")
            return
        way = "leave them out by --data.skip_bad_annotations=true"
        if self.skip_bad_annotations or bad > allowed:
            fraction = math.ceil(1000 * bad / found.total) / 1000
            way += (
                f" with --data.max_bad_fraction={fraction:g} (with {self.bad_images.max_fraction:g}, {allowed} may be)"
            )
        if self.masks and any("segmentation" in finding.reason for finding in found.malformed):
            way += (
                ", or train without masks: --data.masks=false together with a head without masks, such as "
                "--model.head=faster_rcnn"
            )
        raise UserError(f"{said}. Repair or remove them (linvit data check lists all), {way}")

    @cache  # noqa: B019
    def sizes(self, split: str) -> np.ndarray:
        """(H, W) of all images of a split of a source that is no scenes, int (n, 2)."""
        assert isinstance(self.data_source, ObjectSource)
        return self.data_source.sizes(split, self.splits[split], self.exif_orientation)

    def trained_rows(self, rows: datasets.Dataset, chosen: np.ndarray | None) -> np.ndarray | None:
        """Numbers of the training rows without those that have no annotation, or a side of less than `min_side`.

        Raises:
            UserError: If none is left.
        """
        source = self.data_source
        if isinstance(source, SceneSource):
            return chosen
        chosen = np.arange(len(rows)) if chosen is None else chosen
        kept = self.sizes("train").min(1) >= self.min_side
        kept |= self.sizes("train").min(1) == 0  # cannot be read: met, and counted, when it is used
        if self.drop_empty:
            found = self.audit("train")
            kept &= np.bincount(found.flat.rows[found.used], minlength=len(rows)) > 0
        used: np.ndarray = chosen[kept[chosen]]
        if not len(used):
            raise UserError(f"all {len(chosen)} training images of '{source.name}' are without objects or too small")
        if len(used) < len(chosen):
            rank_zero_info(
                f"training leaves out {len(chosen) - len(used)} of {len(chosen)} images of '{source.name}', which have "
                f"no object or a side of less than {self.min_side} pixels (--data.drop_empty, --data.min_side)"
            )
        return used

    def train_sampler(self, samples: Images) -> TrainSampler:
        """The order of the training samples: batches of images wider than high, and others."""
        if isinstance(self.data_source, SceneSource) or not self.group_by_aspect:
            return super().train_sampler(samples)
        height, width = self.sizes("train")[samples.chosen].T
        return GroupedSampler((width > height).astype(int), *self.order_options)

    def check_training(self) -> None:
        """Shows the classes and how many objects each has.

        Raises:
            UserError: If a class has no training object.
        """
        if isinstance(self.data_source, SceneSource):
            return
        counts = {split: self.counts(split) for split in self.splits if split in ("train", "val")}
        lines = class_table(self.class_names, self.classes.ids, counts)
        more = [f"and {len(lines) - TABLE} more: linvit data check"] if len(lines) > TABLE else []
        rank_zero_info("\n".join([f"classes of '{self.source}'", *lines[:TABLE], *more]))
        if not self.empty_classes:
            check_all_occur(self.class_names, counts["train"], self.source)

    def setup(self, stage: str) -> None:
        """Makes the sets that a stage needs: fit, validate, test or predict."""
        if self.trainer is not None and stage != "predict":
            model = self.trainer.lightning_module.hparams.get("num_classes")
            check_model_classes(model, self.num_classes, self.source)
        super().setup(stage)
        folder = None if self.trainer is None else self.trainer.log_dir
        if self.skipped and folder is not None:
            self._write_skipped(Path(folder) / "bad_annotations.csv")

    @rank_zero_only
    def _write_skipped(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [
            (split, annotation_name(one, partial(self.name_of, split)), one.reason, one.detail)
            for split, found in self.skipped.items()
            for one in found
        ]
        with path.open("w", newline="", encoding="utf-8") as file:
            CsvWriter(file).writerows([("split", "annotation", "reason", "detail"), *rows])

    def drawn(self, sample: Sample) -> Sample:
        """A sample with its boxes drawn into its image, if that is RGB of 8 bits."""
        image, boxes = sample["image"], sample["boxes"]
        if not self.bands.eight_bit_rgb:
            return sample
        if "area" in sample:  # of evaluation, whose boxes are at the original size
            boxes = boxes * torch.tensor([image.shape[2] / sample["size"][1], image.shape[1] / sample["size"][0]] * 2)
        boxes = boxes[(boxes[:, 2:] > boxes[:, :2]).all(1)]
        return sample | ({"image": draw_bounding_boxes(image, boxes, width=2)} if len(boxes) else {})

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Normalises the images, and moves boxes and labels of training to their device."""
        batch = super().on_after_batch_transfer(batch, dataloader_idx)
        if not isinstance(batch, dict):
            return batch
        held = batch.pop("held").entries
        if "area" not in held:  # of training
            held = {name: _moved(tensors, batch["image"][0].device) for name, tensors in held.items()}
        return batch | held

    @property
    def _image_bytes(self) -> int:
        """Bytes of an image and ten masks, at most, as a loader process hands them over."""
        height, width = self.limits or self.size
        return (self._pixel_bytes + 10 * self.masks) * height * width


def _moved(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors on a device, by one copy of all of them."""
    return list(torch.cat(tensors).to(device, non_blocking=True).split([len(tensor) for tensor in tensors]))
