"""Images with objects, each with a box, a class and perhaps a mask: embedded, from COCO's files, tables or the hub."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torchvision.utils import draw_bounding_boxes

from linvit.data.base import ImageData, TargetReport
from linvit.data.sources.coco import AnnotationFinding, find_coco
from linvit.data.sources.images import Sample, Target, wrong_size
from linvit.data.sources.labels import Classes, features_of, read_names
from linvit.data.sources.object_audit import (
    ObjectAudit,
    absent_classes,
    annotation_name,
    class_table,
    describe_findings,
    say_left_out,
)
from linvit.data.sources.object_column import OBJECT_COLUMNS, BoxFormat
from linvit.data.sources.objects import ObjectSource
from linvit.data.sources.other_annotations import holds_coco, other_annotations
from linvit.data.sources.pairs import has_masks
from linvit.data.sources.scan import ImageFinding, ScanResult
from linvit.data.sources.scenes import Scenes, SceneSource
from linvit.data.sources.splits import SCENES as DIGIT_SCENES
from linvit.data.sources.splits import has_labels, local_folder, table_features
from linvit.data.transforms.detection import DetectionAugmentation, EvalTransform, TrainTransform
from linvit.data.transforms.segmentation import check_resize_limits
from linvit.errors import UserError, quote_first
from linvit.io.files import rewriting
from linvit.io.plain_text import printable, write_csv

TABLE = 100  # most classes for which the log has a table
WARN_LEFT_OUT = 0.05  # a run warns if at least this fraction of the training objects is left out


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
        object_column: Column of the objects in a table; null finds it.
        box_format: Of the boxes: xywh, the upper left corner and the size, as COCO has them, or xyxy, two corners.
        resize_limits: Longest long side and longest short side of a resized image, which keeps its aspect, such as
            COCO's [1333, 800]; null leaves the size.
        augmentation: Random changes to training images.
        skip_bad_annotations: Leave out malformed annotations, up to `max_bad_fraction` of a split; false refuses them.
        scenes: What `digit_scenes` is like.
        **data: Arguments of `ImageData`: batches, splits, bad images.

    Example:
        $ linvit fit --config detection_quickstart --data.source=path/to/coco
    """

    train_transform: TrainTransform
    eval_transform: EvalTransform
    data_source: ObjectSource | SceneSource
    list_keys: ClassVar[tuple[str, ...]] = ("image", "masks", "size", "image_id")
    cpu_keys: ClassVar[tuple[str, ...]] = ("boxes", "labels", "iscrowd", "area", "rles")
    advanced_options: ClassVar[frozenset[str]] = ImageData.advanced_options | {
        *("object_column", "box_format", "streaming"),
    }

    def __init__(
        self,
        source: str = DIGIT_SCENES,
        img_size: int | Sequence[int] = 224,
        masks: bool = False,
        class_names: list[str] | str | None = None,
        object_column: str | None = None,
        box_format: BoxFormat = "xywh",
        resize_limits: tuple[int, int] | None = None,
        augmentation: DetectionAugmentation = DetectionAugmentation(),  # noqa: B008 (frozen)
        skip_bad_annotations: bool = False,
        scenes: Scenes = Scenes(),  # noqa: B008
        **data: Any,
    ) -> None:
        super().__init__(source, img_size=img_size, **data)
        check_resize_limits(resize_limits)
        if self.stream_options is not None:
            raise UserError("detection does not stream, since batches go by aspect: set --data.streaming=false")
        self.masks = masks
        self.resize_limits = resize_limits
        self.skip_bad_annotations = skip_bad_annotations
        self.skipped: list[tuple[str, str, str, str]] = []
        self.train_transform = TrainTransform(resize_limits, augmentation, masks)
        self.eval_transform = EvalTransform(resize_limits, masks)
        if source == DIGIT_SCENES:
            self.data_source = SceneSource(self.images, scenes, self.size)
            return
        self.data_source = ObjectSource(
            source,
            self.images,
            data.get("image_column"),
            self.val_fraction,
            given_column=object_column,
            box_format=box_format,
            given_names=read_names(class_names) if isinstance(class_names, str) else class_names,
            masks=masks,
        )

    @property
    def classes(self) -> Classes:
        """The classes in the order of their labels."""
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
        """COCO's ids of the classes, from 1 on if the data have names instead; None if the source does not exist."""
        try:
            ids = self.classes.ids
        except UserError:
            if self.predict_source is None:
                raise
            return None
        return [*range(1, len(ids) + 1)] if any(isinstance(key, str) for key in ids) else ids

    def targets(self, split: str) -> Mapping[str, Target]:
        """Returns the objects of a split after checking them."""
        source = self.data_source
        if isinstance(source, SceneSource):
            return {name: Target("scene") for name in ("objects", "image_id")}
        table = source.table_of(split)
        if table not in source.splits:
            return {}  # which has its own message
        features = source.splits[table].features
        if source.column is None or source.column.name not in features or not self.annotated(source, table):
            way = "put COCO's annotations beside the images, or name the column with --data.object_column"
            if source.column is not None and source.column.name in features and source.audit(table).total:
                way = "its annotations are malformed, or of classes that --data.class_names leaves out"
            elif source.coco is not None:
                way = "its annotation file lists none"
            raise UserError(
                f"the {split} split of data source '{source.name}' has no objects, so it can only be predicted (linvit "
                f"predict): {way}"
            )
        known = [name for name in ("height", "width", "image_id") if name in features]
        return {"objects": Target(source.column.name)} | {name: Target(name) for name in known}

    def predicted_targets(self) -> Mapping[str, Target]:
        """Returns COCO's numbers of the images, which its results need."""
        column = "scene" if isinstance(self.data_source, SceneSource) else "image_id"
        known = self.predict_source is None and column in features_of(self.splits)
        return {"image_id": Target(column)} if known else {}

    @cache  # noqa: B019 (a data module lives as long as its run)
    def annotated(self, source: ObjectSource, split: str) -> bool:
        """True if a split has objects; raises a `UserError` if too many are malformed or of another format."""
        found, name = source.audit(split), partial(source.name_of, split)
        bad, allowed = len(found.malformed), self.bad_images.allowed_of(found.total)
        said = f"{bad:,} of the {found.total:,} annotations in the {split} split of '{self.source}' are malformed: "
        said += "; ".join(describe_findings(found.malformed, name))
        if bad and self.skip_bad_annotations and bad <= allowed:
            self.skipped += [(split, annotation_name(one, name), one.reason, one.detail) for one in found.malformed]
            rank_zero_warn(f"{said}. They are left out; bad_annotations.csv in the folder of a training run lists them")
        elif bad:
            way = "--data.skip_bad_annotations=true"
            if bad > allowed:
                way += f" --data.max_bad_fraction={math.ceil(1000 * bad / found.total) / 1000:g}"
            if self.masks and any("segmentation" in finding.reason for finding in found.malformed):
                way += ", or train without masks by --data.masks=false --model.head=faster_rcnn"
            raise UserError(f"{said}. Repair or remove them (linvit data check lists all), or leave them out by {way}")
        if found.wrong_format is not None:
            raise UserError(f"the {split} split of '{self.source}': {found.wrong_format}")
        return bool(found.annotated.any())

    def check_training(self) -> None:
        """Shows how many objects of each class are trained on; warns of classes without any and of those left out.

        Raises:
            UserError: If all objects are left out, and a run is to be trained.
        """
        source = self.data_source
        if isinstance(source, SceneSource):
            return
        counts = {split: source.counts(split) for split in ("train", "val")}
        if not counts["train"].any() and self.trainer is not None:
            raise UserError(_untrainable(source))
        self._warn_of_training(source, counts)
        lines = class_table(self.class_names, self.classes.ids, counts)
        more = [f"and {len(lines) - TABLE} more: linvit data check"] if len(lines) > TABLE else []
        rank_zero_info(printable("\n".join([f"classes of '{self.source}'", *lines[:TABLE], *more])))

    def _warn_of_training(self, source: ObjectSource, counts: Mapping[str, Any]) -> None:
        """Warns of objects that are left out, of classes without any, and of a validation split without any."""
        found = source.used("train")
        if _leaves_out_many(found):
            said = say_left_out(found, partial(source.name_of, "train"))
            rank_zero_warn(f"training on '{self.source}' leaves out {said}. linvit data check --output FILE lists all")
        if warning := absent_classes(self.class_names, found.per_class):
            rank_zero_warn(warning)
        if "val" in counts and _leaves_out_many(scored := source.used("val")):
            said = say_left_out(scored, partial(source.name_of, source.table_of("val")))
            rank_zero_warn(f"validation on '{self.source}' scores objects that training would leave out, {said}")
        if "val" in counts and source.used("val").annotated.any() and not counts["val"].any():
            rank_zero_warn(f"all objects of the validation split of '{self.source}' are crowds, which are not scored")

    def setup(self, stage: str) -> None:
        """Makes the sets that a stage needs, and lists annotations that are skipped; see `ImageData`."""
        super().setup(stage)
        folder = self._folder
        if self.skipped and folder is not None and self._rank_and_world[0] == 0:
            path = folder / "bad_annotations.csv"
            folder.mkdir(parents=True, exist_ok=True)
            with rewriting(path) as part, part.open("w", newline="", encoding="utf-8") as file:
                write_csv(file, [("split", "annotation", "reason", "detail"), *self.skipped])

    @classmethod
    def recognises(cls, source: str) -> bool:
        """True for COCO's files, a table with a column of objects, and any annotations of unlabelled images."""
        folder = local_folder(source)
        if folder and find_coco(folder):
            return not has_labels(source) or holds_coco(folder)
        if not table_features(source).keys().isdisjoint(OBJECT_COLUMNS):
            return True
        if folder is None or has_masks(source):
            return False
        return bool(other_annotations(folder)) and not has_labels(source)

    def check_targets(self, found: ScanResult, workers: int) -> TargetReport:
        """Looks at all objects; see `ImageData.check_targets`."""
        source, lines = self.data_source, [f"{self.source}: {self.num_classes} classes"]
        bad: list[ImageFinding] = []
        malformed: list[ImageFinding] = []
        noted: list[ImageFinding] = []
        refused = []
        assert isinstance(source, ObjectSource)  # scenes are not checked
        audits = {
            split: source.audit(split)
            for split, rows in self.splits.items()
            if source.column is not None and source.column.name in rows.features
        }
        lines += [f"  {split:<10}no objects" for split in self.splits if split not in audits]
        warned = ("train", "val") if "train" in audits else ()  # of left-out objects, below
        for split, audit in audits.items():
            name, rows = partial(source.name_of, split), len(audit.annotated)
            empty, objects = int((audit.annotated == 0).sum()), int(audit.annotated.sum())
            lines.append(
                f"  {split:<10}{rows:>12,} images, {empty:,} of them without objects; {objects:,} objects, "
                f"{audit.crowds:,} of them crowds"
            )
            used = source.used(split)
            training = "training leaves out" if split == "train" else "scored, but training would leave out"
            if (said := say_left_out(used, name)) and not (split in warned and _leaves_out_many(used)):
                lines.append(f"  {split:<10}WARNING: {training} {said}")
            noted += _findings(split, audit.left_out, name)
            skipped = self.skip_bad_annotations and len(audit.malformed) <= self.bad_images.allowed_of(audit.total)
            if audit.malformed:
                said = "annotations are malformed and left out" if skipped else "ANNOTATIONS ARE MALFORMED"
                lines.append(f"  {split:<10}{len(audit.malformed):>12,} of {audit.total:,} {said}")
                lines += [f"    {line}" for line in describe_findings(audit.malformed, name) if not skipped]
            (noted if skipped else malformed).extend(_findings(split, audit.malformed, name))
            lines += [f"  {split:<10}WARNING: objects: {line}" for line in describe_findings(audit.repeated, name)]
            noted += _findings(split, audit.repeated, name)
            if audit.wrong_format is not None:
                bad.append(ImageFinding(split, "boxes", audit.wrong_format))
            for row, (stored, said) in enumerate(zip(found.sizes[split], source.sizes(split).tolist(), strict=True)):
                if any(stored) and [*stored] != said:
                    bad.append(ImageFinding(split, name(row), wrong_size("its annotations are for", said, stored)))
        if found.turned:
            names = quote_first([one for _, one in found.turned])
            lines.append(
                f"  WARNING: {len(found.turned):,} images are turned by EXIF, so their boxes must be of the turned "
                f"images: {names}. If they are of the pixels as stored, set --data.exif_orientation=false"
            )
        named = [
            split for split in {**dict.fromkeys(["train", "val"]), **audits} if source.held_out(split)[0] in audits
        ]
        counts = {split: source.counts(split) for split in named}
        lines += [f"  {line}" for line in class_table(self.class_names, self.classes.ids, counts)]
        if "train" in counts and not counts["train"].any() and source.used("train").left_out:
            refused.append(f"  NO TRAINING  {_untrainable(source)}")
        elif "train" in counts:
            self._warn_of_training(source, counts)
        return TargetReport(lines, bad, malformed, refused, noted=noted)

    def drawn(self, sample: Sample) -> Sample:
        """Returns a sample with its boxes drawn into its image, if that is RGB of 8 bits."""
        image, boxes = sample["image"], sample["boxes"]
        if not self.bands.eight_bit_rgb:
            return sample
        if "area" in sample:  # of evaluation, whose boxes are at the original size
            boxes = boxes * torch.tensor([image.shape[2] / sample["size"][1], image.shape[1] / sample["size"][0]] * 2)
        boxes = boxes[(boxes[:, 2:] > boxes[:, :2]).all(1)]
        return sample | ({"image": draw_bounding_boxes(image, boxes, width=2)} if len(boxes) else {})

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Moves a batch, except `index`, which the host reads."""
        return super().transfer_batch_to_device(batch, device, dataloader_idx) | {"index": batch["index"]}

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Normalises the images, and moves boxes and labels of training to their device."""
        batch = super().on_after_batch_transfer(batch, dataloader_idx)
        entries = batch.pop("not_transferred").entries
        for name, tensors in {} if "area" in entries else entries.items():  # of training: by one copy for all images
            moved = torch.cat(tensors).to(batch["image"][0].device, non_blocking=True)
            entries[name] = list(moved.split([len(tensor) for tensor in tensors]))
        return batch | entries


def _untrainable(source: ObjectSource) -> str:
    """Says that no object of a source can be trained on, and why."""
    said = say_left_out(source.used("train"), partial(source.name_of, "train"))
    return f"no object of '{source.name}' can be trained on. Training leaves out {said}. Repair the annotations"


def _leaves_out_many(found: ObjectAudit) -> bool:
    """True if a run warns of the objects that it leaves out."""
    return bool(found.left_out) and len(found.left_out) >= WARN_LEFT_OUT * found.annotated.sum()


def _findings(split: str, found: Sequence[AnnotationFinding], name: Callable[[int], str]) -> list[ImageFinding]:
    """Returns the same annotations as `linvit data check` lists them."""
    reasons = [": ".join(filter(None, (one.reason, one.detail))) for one in found]
    return [ImageFinding(split, annotation_name(one, name), reason) for one, reason in zip(found, reasons, strict=True)]
