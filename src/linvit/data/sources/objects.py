"""Images with objects in COCO's files, tables or on the hub: boxes, classes, masks; and whether these can be used."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import datasets
import numpy as np
import pyarrow.compute
from lightning.pytorch.utilities import rank_zero_info
from tqdm import tqdm

from linvit import coco_masks
from linvit.data.sources.coco import AnnotationFinding, CocoTables, find_coco, load_coco, other_format, rle_counts
from linvit.data.sources.data_source import DataSource, Splits
from linvit.data.sources.images import Sample, SampleReader, Target, Transform, check_target_sizes
from linvit.data.sources.labels import Classes, features_of, find_column, undecoded
from linvit.data.sources.read import BadImageError, name_of
from linvit.data.sources.splits import HUB, load_splits
from linvit.data.transforms.detection import EMPTY_MASK, Objects, left_out, trainable, usable
from linvit.errors import UserError, check_choice, did_you_mean, quote_first

THREADS = 16
MIN_SIDE = 32  # pixels; training leaves out images with a shorter side, and those without objects, as mmdetection does
WRONG_FORMAT = 0.3  # fraction of boxes that reach out of their images, from which on they are taken for another format
SLACK = 1.0  # pixels by which a box may
BoxFormat = Literal["xywh", "xyxy"]
OBJECT_COLUMNS = ("objects", "annotations", "object")
FIELDS = ("bbox", "category", "id", "area", "iscrowd", "ignore", "segmentation")


class ObjectColumn(NamedTuple):
    """Where a table has its objects, in structs of lists or lists of structs; `names` are of the classes, if known."""

    name: str
    fields: list[str]
    names: list[str] | None
    box_format: str

    def lists(self, cell: Any, place: str) -> dict[str, list[Any]]:
        """The values of each field of the objects in a cell."""
        of_lists = cell or {}
        found = {
            field: [one[field] for one in cell] if isinstance(cell, list) else of_lists.get(field) or []
            for field in self.fields
        }
        if len({len(values) for values in found.values()}) > 1:
            counts = ", ".join(f"{len(values)} of {field}" for field, values in found.items())
            raise UserError(f"{place} of column '{self.name}' has {counts}; each object needs one of each")
        return found

    def objects(self, lists: Mapping[str, list[Any]]) -> dict[str, np.ndarray]:
        """Arrays of the boxes and the other fields of n objects; boxes that are not four numbers are NaN."""
        boxes = [box if box is not None and len(box) == 4 else [np.nan] * 4 for box in lists["bbox"]]
        corners = np.array(boxes, np.float64).reshape(-1, 4)
        if self.box_format == "xywh":
            corners[:, 2:] += corners[:, :2]
        kinds = {"iscrowd": bool, "ignore": bool, "area": np.float64}
        return {"boxes": corners} | {name: np.array(lists[name], kind) for name, kind in kinds.items() if name in lists}


def object_column(features: Mapping[str, Any], given: str | None, box_format: str, source: str) -> ObjectColumn | None:
    """Finds the column of objects; None if there is none."""
    check_choice("box_format", box_format, get_args(BoxFormat))
    name = find_column(features, given, (), OBJECT_COLUMNS, source)
    if name is None:
        return None
    kinds = getattr(features[name], "feature", features[name])  # of a list of structs, or of a struct of lists
    if not isinstance(kinds, dict) or not {"bbox", "category"} <= kinds.keys():
        raise UserError(f"column '{name}' of data source '{source}' holds no objects (bbox, category), but {kinds}")
    kind = kinds["category"]
    names = getattr(getattr(kind, "feature", kind), "names", None)
    return ObjectColumn(name, [field for field in FIELDS if field in kinds], names, box_format)


@dataclass
class ObjectReader(SampleReader):
    """How a row with objects becomes a sample; those of a category without a label are left out."""

    column: ObjectColumn | None = None
    labels: Mapping[Any, int] | None = None
    masks: bool = False

    def complete(self, sample: Sample, name: str) -> None:
        """Turns the cell of the objects into arrays."""
        check_target_sizes(sample, name)
        for side in ("height", "width"):
            sample.pop(side, None)
        if "objects" in sample:
            try:
                sample["objects"] = self._objects(sample["objects"], tuple(sample["image"].shape[-2:]))
            except (UserError, TypeError, KeyError, ValueError) as error:
                raise BadImageError(name, f"its objects are malformed: {error}") from error

    def _objects(self, cell: Any, size: tuple[int, int]) -> Objects:
        assert self.column is not None
        assert self.labels is not None
        lists = self.column.lists(cell, "a row")
        objects: dict[str, Any] = self.column.objects(lists)
        objects["labels"] = np.array([self.labels.get(category, -1) for category in lists["category"]], np.int64)
        kept = usable(objects, size) & (objects["labels"] >= 0)  # the others were refused, or are skipped
        objects = {name: values[kept] for name, values in objects.items()}
        if self.masks:
            stored = [lists["segmentation"][i] for i in np.flatnonzero(kept)]
            counts = [mask_counts(one, size) for one in stored]
            readable = np.array([one is not None for one in counts], bool)
            objects = {name: values[readable] for name, values in objects.items()}
            objects["rles"] = [{"size": list(size), "counts": one} for one in counts if one is not None]
        return objects


class ObjectAudit(NamedTuple):
    """The objects of a split.

    `annotated` counts those of each image that are sound and of a class, int (rows,). `trained` and `scored` have the
    row and the label of each of them that training uses, and that evaluation scores: all but crowds; `training` says
    which of both the split is for. `left_out` names those of them that training leaves out, `malformed` those that
    cannot be read; `total` counts all, of other categories, too. `wrong_format` says if the boxes seem to be stored in
    another format.
    """

    annotated: np.ndarray
    trained: np.ndarray
    scored: np.ndarray
    training: bool
    num_classes: int
    crowds: int
    total: int
    left_out: list[AnnotationFinding]
    malformed: list[AnnotationFinding]
    wrong_format: str | None

    @property
    def without_mask(self) -> list[AnnotationFinding]:
        """Those whose mask is empty, missing or malformed, if masks were looked at."""
        return [
            one for one in (*self.malformed, *self.left_out) if "segmentation" in one.reason or "mask" in one.reason
        ]

    @property
    def per_class(self) -> np.ndarray:
        """Number of objects of each class that are trained on or scored, int (K,)."""
        return np.bincount((self.trained if self.training else self.scored)[:, 1], minlength=self.num_classes)

    def of_rows(self, rows: np.ndarray) -> "ObjectAudit":
        """Returns the same of the images of some rows; what is malformed stays."""
        chosen = np.isin(np.arange(len(self.annotated)), rows)
        return self._replace(
            annotated=self.annotated * chosen,
            trained=self.trained[chosen[self.trained[:, 0]]],
            scored=self.scored[chosen[self.scored[:, 0]]],
            left_out=[one for one in self.left_out if chosen[one.row]],
        )


def audit_objects(
    rows: datasets.Dataset,
    column: ObjectColumn,
    sizes: np.ndarray,
    labels: Mapping[Any, int],
    subset: bool,
    masks: bool,
    training: bool,
    unread: Sequence[AnnotationFinding] = (),
) -> ObjectAudit:
    """Looks at all objects of a split, in the order of its rows.

    Args:
        rows: The table.
        column: Column of the objects.
        sizes: (H, W) of each image, 0 if unknown.
        labels: The label of each category.
        subset: True if objects of other categories are left out, false if they are malformed.
        masks: True if masks are trained.
        training: True of the training split, whose small images are left out.
        unread: Annotations that are malformed and not in the table.
    """
    cells = rows.select_columns([column.name]).with_format("arrow")[:][column.name].to_pylist()
    each = [column.lists(cell, f"row {row}") for row, cell in enumerate(cells)]
    lists = {field: [*chain.from_iterable(own[field] for own in each)] for field in column.fields}
    objects, categories = column.objects(lists), lists["category"]
    where = np.repeat(np.arange(len(each)), [len(own["bbox"]) for own in each])
    size = tuple(np.where(sizes > 0, sizes, np.inf)[where].T)  # infinite where it is not known
    sound = usable(objects, size)
    known = np.array([category in labels for category in categories], bool)
    corners = objects["boxes"].tolist()

    def findings(which: np.ndarray, reason: str, details: Sequence[Any] = corners) -> list[AnnotationFinding]:
        ids = lists.get("id") or range(len(where))
        places = np.flatnonzero(which).tolist()
        return [AnnotationFinding(int(where[i]), str(ids[i]), reason, str(details[i])) for i in places]

    unsound = "a box that is not four finite numbers, or is far outside of its image, or an infinite area"
    malformed = [
        *unread,
        *findings(~sound, unsound),
        *findings(sound & ~known & (not subset), "a category that is none of the classes", categories),
    ]
    if masks:
        pixels = _mask_areas(lists["segmentation"], sizes[where])
        malformed += findings(sound & known & (pixels < 0), "no segmentation, or a malformed one")
        sound &= pixels >= 0
    annotated = sound & known
    reasons = {f"an image with a side of less than {MIN_SIDE} pixels": np.min(size, 0) < MIN_SIDE} if training else {}
    reasons |= left_out(objects, size)
    if masks:
        reasons[EMPTY_MASK] = pixels == 0
    crowds = objects.get("iscrowd", np.zeros(len(where), bool))
    scored, unused = annotated & ~crowds, list[AnnotationFinding]()
    trained = (annotated if training else scored).copy()
    for reason, which in reasons.items():  # an object has the first of its reasons
        unused += findings(trained & which, reason)
        trained &= ~which
    used, evaluated = (
        np.array([(where[i], labels[categories[i]]) for i in np.flatnonzero(which)], np.int64).reshape(-1, 2)
        for which in (trained, scored)
    )
    return ObjectAudit(
        np.bincount(where[annotated], minlength=len(cells)),
        used,
        evaluated,
        training,
        len(labels),
        int(crowds.sum()),
        len(where) + len(unread),
        unused,
        malformed,
        _wrong_format(objects["boxes"], size, column.box_format),
    )


def mask_counts(stored: Any, size: tuple[int, int]) -> str | None:
    """The counts of the compressed RLE of a stored mask (H, W), or None if it is missing or malformed."""
    try:
        return stored if isinstance(stored, str) else rle_counts(stored, size)  # COCO's table has text
    except (UserError, KeyError, TypeError, ValueError, OverflowError):
        return None


def _mask_areas(stored: Sequence[Any], sizes: np.ndarray) -> np.ndarray:
    """Returns the pixels of masks, int (n,): -1 of those that cannot be read, 1 where the image cannot."""

    def pixels(one: Any, size: tuple[int, int]) -> int:
        if not min(size):
            return 1
        counts = mask_counts(one, size)
        return -1 if counts is None else int(coco_masks.area([{"size": list(size), "counts": counts}])[0])

    return np.array([pixels(one, tuple(size)) for one, size in zip(stored, sizes.tolist(), strict=True)], np.int64)


def _wrong_format(boxes: np.ndarray, size: tuple[Any, ...], box_format: str) -> str | None:
    finite = np.isfinite(boxes).all(1)
    boxes, height, width = boxes[finite], size[0][finite], size[1][finite]
    if not len(boxes):
        return None
    if boxes.max() <= 1 and (boxes % 1).any():
        return "no coordinate of a box is above 1: boxes must be in pixels, not in fractions of the image"
    beyond = ((boxes[:, 2] > width + SLACK) | (boxes[:, 3] > height + SLACK)).mean()
    wrong = max(beyond, 1 - trainable({"boxes": boxes}, (height, width)).mean())
    other = "xywh" if box_format == "xyxy" else "xyxy"
    said = (
        f"{wrong:.0%} of the boxes reach beyond their image, or have no area. They are read as {box_format}; are they "
        f"{other} (--data.box_format={other})?"
    )
    return said if wrong > WRONG_FORMAT else None


def annotation_name(finding: AnnotationFinding, name: Callable[[int], str]) -> str:
    """What messages call an annotation, by what they call the image of a row."""
    return f"annotation {finding.id}" + (f" of {name(finding.row)}" if finding.row >= 0 else "")


def describe_findings(findings: Sequence[AnnotationFinding], name: Callable[[int], str]) -> list[str]:
    """How many annotations have what, the most frequent first, each with an example in an image by its name."""
    first = {finding.reason: finding for finding in reversed(findings)}
    return [
        f"{count:,} with {reason}, such as {annotation_name(first[reason], name)}"
        + (f": {first[reason].detail}" if first[reason].detail else "")
        for reason, count in Counter(finding.reason for finding in findings).most_common()
    ]


def say_left_out(found: ObjectAudit, name: Callable[[int], str]) -> str:
    """Says how many of the objects training leaves out, and why; "" if none."""
    if not found.left_out:
        return ""
    count, why = len(found.left_out), "; ".join(describe_findings(found.left_out, name))
    total = found.annotated.sum()
    return f"{count:,} of {total:,} objects ({count / total:.1%}): {why}"


REPAIRS = {
    "an area of 0 or less": "leave the field area out of the annotations, and the boxes' areas are taken",
    "iscrowd: 1": "set iscrowd to 0 in the annotations of single objects",
    "ignore: 1": "set ignore to 0",
    EMPTY_MASK: "repair the polygons, or train without masks: --data.masks=false --model.head=faster_rcnn",
}
"""A way out for objects that are left out for a reason; for other reasons their boxes must be repaired."""


def untrainable(source: str, found: ObjectAudit, name: Callable[[int], str]) -> str:
    """Says that no object of a source can be trained on, why, and what to do."""
    (reason, _), *_ = Counter(finding.reason for finding in found.left_out).most_common() or [("", 0)]
    way = REPAIRS.get(reason, "repair the boxes, which are in pixels")
    return f"no object of '{source}' can be trained on. Training leaves out {say_left_out(found, name)}. Way out: {way}"


def absent_classes(names: Sequence[str], counts: np.ndarray) -> str | None:
    """What to warn of if classes have no training object."""
    absent = [name for name, count in zip(names, counts.tolist(), strict=True) if not count]
    return f"{len(absent)} classes have no training object: {quote_first(absent)}" if absent else None


def class_table(names: Sequence[str], ids: Sequence[Any], counts: Mapping[str, np.ndarray]) -> list[str]:
    """A line per class: its label, the category's id in the data, its name, and how many objects each split has."""
    wide = max(5, *map(len, names))
    lines = [f"label {'id':>6}  {'class':{wide}}" + "".join(f"{split:>10}" for split in counts)]
    for label, (name, key) in enumerate(zip(names, ids, strict=True)):
        objects = "".join(f"{own[label]:>10,}" for own in counts.values())
        lines.append(f"{label:>5} {key!s:>6}  {name:{wide}}{objects}")
    return lines


@dataclass(eq=False, kw_only=True)
class ObjectSource(DataSource):
    """A source with objects: COCO's files, or what `load_splits` knows; for the fields see `DetectionData`."""

    given_column: str | None
    box_format: str
    given_names: list[str] | None
    masks: bool

    @cached_property
    def coco(self) -> CocoTables | None:
        """The tables of COCO's files, if it has such."""
        path = Path(self.name).expanduser()
        files = find_coco(path) if not self.name.startswith(HUB) and path.is_dir() else {}
        return load_coco(path, files, self.masks) if files else None

    @property
    def has_masks(self) -> bool:
        """True if its annotations may have masks."""
        return self.coco is not None or (self.column is not None and "segmentation" in self.column.fields)

    @cached_property
    def tables(self) -> Splits:
        """The rows of each split as they are stored."""
        return load_splits(self.name, classes=False) if self.coco is None else self.coco.splits

    @cache  # noqa: B019 (a source lives as long as its run)
    def audit(self, split: str) -> ObjectAudit:
        """What there is to say about all objects of a split."""
        assert self.column is not None
        unread = [] if self.coco is None else self.coco.malformed[split]
        subset, labels = self.given_names is not None, self.classes.labels
        sizes, training = self.sizes(split), split == "train"
        return audit_objects(self.splits[split], self.column, sizes, labels, subset, self.masks, training, unread)

    def used(self, split: str) -> ObjectAudit:
        """What there is to say about the objects that a split trains on or scores, of its part of a table."""
        table, chosen = self.held_out(split)
        found = self.audit(table)._replace(training=split == "train")
        return found if chosen is None else found.of_rows(chosen)

    def counts(self, split: str) -> np.ndarray:
        """Returns how many objects of each class a split trains on or scores, int (K,); see `ObjectAudit`."""
        return self.used(split).per_class

    @cached_property
    def column(self) -> ObjectColumn | None:
        """Where the objects are."""
        column = object_column(features_of(self.tables), self.given_column, self.box_format, self.name)
        if column is not None and self.masks and "segmentation" not in column.fields:
            raise UserError(
                f"the objects of '{self.name}' have no masks ('segmentation'): leave --data.masks at false, and train "
                f"a head without masks"
            )
        return column

    @cached_property
    def classes(self) -> Classes:
        """The classes, in the order of their ids."""
        column, given = self.column, self.given_names
        if column is None:
            path = Path(self.name).expanduser()
            other = other_format(path) if not self.name.startswith(HUB) and path.is_dir() else ""
            raise UserError(
                f"data source '{self.name}' has no objects{other}; it has: {', '.join(features_of(self.tables))}"
            )
        if self.coco is not None:
            found: dict[Any, str] = dict(self.coco.categories)
        elif column.names is not None:
            found = dict(enumerate(column.names))
        else:
            rows = self.splits.get("train", next(iter(self.splits.values())))
            lists = [column.lists(cell, f"row {row}") for row, cell in enumerate(rows[column.name])]
            ids = sorted({key for own in lists for key in own["category"]} - {None})
            found = {key: str(key) for key in ids}
            if given is not None and not isinstance(next(iter(ids), ""), str):  # which it names in this order
                if len(given) != len(ids):
                    raise UserError(
                        f"class_names has {len(given)} names, but the objects of '{self.name}' are of {len(ids)} "
                        f"categories, {ids[:10]}"
                    )
                found = dict(zip(ids, given, strict=True))
        if not found:
            raise UserError(f"data source '{self.name}' has no categories")
        if unknown := [name for name in given or () if name not in found.values()]:
            hint = did_you_mean(unknown[0], found.values())
            raise UserError(f"'{self.name}' has no class '{unknown[0]}' (--data.class_names).{hint}")
        used = {key: name for key, name in found.items() if given is None or name in given}
        return Classes([*used.values()], [*used])

    @cache  # noqa: B019
    def sizes(self, split: str) -> np.ndarray:
        """(H, W) of all images, int (n, 2): as the table says, or by the headers of files; 0 where none can be read."""
        rows = self.splits[split]
        if {"height", "width"} <= rows.features.keys():
            table = rows.select_columns(["height", "width"]).with_format("arrow")[:]
            sides = [pyarrow.compute.fill_null(table[side], 0).to_numpy() for side in ("height", "width")]
            return np.stack(sides, 1).astype(np.int64)
        images = undecoded(rows, self.image_column)
        with ThreadPoolExecutor(THREADS) as pool:
            found = pool.map(lambda row: self.images.size(images[row][self.image_column]) or (0, 0), range(len(images)))
            return np.array([*tqdm(found, f"sizes of {split} images", len(images), delay=5)], np.int64).reshape(-1, 2)

    def trained_rows(self, chosen: np.ndarray | None) -> np.ndarray:
        """Numbers of the training rows without those that have no annotation, or a side of less than `MIN_SIDE`."""
        shorter = self.sizes("train").min(1)
        chosen = np.arange(len(shorter)) if chosen is None else chosen
        kept = (shorter >= MIN_SIDE) | (shorter == 0)  # 0 cannot be read: met, and counted, when it is used
        kept &= self.audit("train").annotated > 0
        used: np.ndarray = chosen[kept[chosen]]
        if not len(used):
            raise UserError(f"all {len(chosen)} training images of '{self.name}' are without objects or too small")
        if len(used) < len(chosen):
            rank_zero_info(
                f"training leaves out {len(chosen) - len(used)} of {len(chosen)} images of '{self.name}', which have "
                f"no object or a side of less than {MIN_SIDE} pixels"
            )
        return used

    def groups(self, chosen: np.ndarray) -> np.ndarray:
        """Whether images are wider than high, which batches tell apart."""
        height, width = self.sizes("train")[chosen].T
        wide: np.ndarray = (width > height).astype(int)
        return wide

    def name_of(self, split: str, row: int) -> str:
        """What messages call the image of a row."""
        return name_of(undecoded(self.splits[split], self.image_column)[row][self.image_column], f"row {row}")

    def reader(self, targets: Mapping[str, Target], transform: Transform) -> SampleReader:
        """What makes samples of rows; see `DataSource.reader`."""
        found = (self.column, self.classes.labels, self.masks) if "objects" in targets else ()
        return ObjectReader(transform, self.image_column, targets, self.images, *found)
