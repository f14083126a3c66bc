"""The column of a table that says what is in its images: boxes, classes, masks; and whether these can be used."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import datasets
import numpy as np
import pyarrow
import pyarrow.compute

from linvit.data.sources.coco import AnnotationFinding, rle_counts
from linvit.data.sources.images import Sample, SampleReader, Target, check_target_sizes
from linvit.data.sources.labels import find_column
from linvit.data.sources.read import BadImageError
from linvit.data.transforms.detection import Objects, trainable, usable
from linvit.errors import UserError, check_choice, quote_first

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

    def corners(self, boxes: np.ndarray) -> np.ndarray:
        """Boxes (n, 4) as x1, y1, x2, y2."""
        return boxes if self.box_format == "xyxy" else np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], 1)


def object_column(features: Mapping[str, Any], given: str | None, box_format: str, source: str) -> ObjectColumn | None:
    """Finds the column of objects; None if there is none."""
    check_choice("box_format", box_format, get_args(BoxFormat))
    name = find_column(features, given, (), OBJECT_COLUMNS, source)
    if name is None:
        return None
    kinds = getattr(features[name], "feature", features[name])  # of a list of structs, or of a struct of lists
    if not isinstance(kinds, dict):
        raise UserError(f"column '{name}' of data source '{source}' holds no objects, but {features[name]}")
    for field in ("bbox", "category"):
        if field not in kinds:
            raise UserError(
                f"column '{name}' of data source '{source}' has no field '{field}'; it has: {', '.join(kinds)}"
            )
    kind = kinds["category"]
    names = getattr(getattr(kind, "feature", kind), "names", None)
    return ObjectColumn(name, [field for field in FIELDS if field in kinds], names, box_format)


class FlatObjects(NamedTuple):
    """The objects of all rows of a table, one after another, without masks.

    Row, id and stored category of each (n,), and `objects`: boxes, iscrowd, ignore and area.
    """

    rows: np.ndarray
    ids: np.ndarray
    categories: np.ndarray
    objects: dict[str, np.ndarray]


def flat_objects(rows: datasets.Dataset, column: ObjectColumn) -> FlatObjects:
    """Reads all objects of a table at once; a table of COCO's size takes a second. Boxes that are not four are NaN."""
    cells = rows.select_columns([column.name]).with_format("arrow")[:][column.name]
    cells = cells.combine_chunks() if isinstance(cells, pyarrow.ChunkedArray) else cells
    compute, of_lists = pyarrow.compute, pyarrow.types.is_struct(cells.type)
    lists = {field: compute.struct_field(cells, field) if of_lists else cells for field in column.fields}
    lengths = {field: compute.list_value_length(own).fill_null(0).to_numpy() for field, own in lists.items()}
    for field, own in lengths.items():
        if differ := np.flatnonzero(own != lengths["bbox"]).tolist():
            raise UserError(
                f"row {differ[0]} of column '{column.name}' has {lengths['bbox'][differ[0]]} of bbox and "
                f"{own[differ[0]]} of {field}; each object needs one of each"
            )

    def values(field: str) -> pyarrow.Array:
        flat = compute.list_flatten(lists[field])
        return flat if of_lists else compute.struct_field(flat, field)

    where, boxes = np.repeat(np.arange(len(cells)), lengths["bbox"]), values("bbox")
    four = np.equal(compute.list_value_length(boxes).fill_null(0).to_numpy(zero_copy_only=False), 4)
    flat = compute.list_flatten(boxes.filter(four)).cast(pyarrow.float64()).fill_null(np.nan)
    corners = np.full((len(four), 4), np.nan)
    corners[four] = flat.to_numpy(zero_copy_only=False).reshape(-1, 4)
    found = {"boxes": column.corners(corners)}
    for field in ("iscrowd", "ignore"):
        if field in column.fields:
            found[field] = values(field).fill_null(False).to_numpy(zero_copy_only=False).astype(bool)
    if "area" in column.fields:
        found["area"] = values("area").cast(pyarrow.float64()).to_numpy(zero_copy_only=False)
    ids = values("id").to_numpy(zero_copy_only=False) if "id" in column.fields else np.arange(len(where))
    return FlatObjects(where, ids, values("category").to_numpy(zero_copy_only=False), found)


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
        fields, cell = self.column.fields, cell or {}
        lists = cell if isinstance(cell, dict) else {field: [one[field] for one in cell] for field in fields}
        found = {field: lists.get(field) or [] for field in fields}
        kept = [i for i, category in enumerate(found["category"]) if category in self.labels]
        stored = [found["bbox"][i] or () for i in kept]
        boxes = np.array([box if len(box) == 4 else [np.nan] * 4 for box in stored], np.float64).reshape(-1, 4)
        objects: dict[str, Any] = {
            "boxes": self.column.corners(boxes),
            "labels": np.array([self.labels[found["category"][i]] for i in kept], np.int64),
        }
        for field, kind in (("iscrowd", bool), ("ignore", bool), ("area", np.float64)):
            if field in fields:
                objects[field] = np.array([found[field][i] for i in kept], kind)
        sound = usable(objects, (size[0], size[1]))  # the others were refused, or are skipped
        objects = {name: values[sound] for name, values in objects.items()}
        if self.masks:
            stored = [found["segmentation"][i] for i, good in zip(kept, sound, strict=True) if good]
            counts = [one if isinstance(one, str) else rle_counts(one, size) for one in stored]  # COCO's table has text
            objects["rles"] = [{"size": list(size), "counts": one} for one in counts]
        return objects


def object_targets(column: ObjectColumn, features: Mapping[str, Any]) -> dict[str, Target]:
    """What is read of a row: objects, and where the table says them the size and COCO's number of the image."""
    known = [name for name in ("height", "width", "image_id") if name in features]
    return {"objects": Target(column.name), **{name: Target(name) for name in known}}


class ObjectAudit(NamedTuple):
    """The objects of a split: which are of a class and sound, bool (n,), and how many each class has, int (K,).

    `total` counts malformed annotations, too; `untrained` are left out of training though the data do not say so.
    `wrong_format` says if the boxes seem to be stored in another format.
    """

    flat: FlatObjects
    used: np.ndarray
    counts: np.ndarray
    total: int
    malformed: list[AnnotationFinding]
    untrained: list[AnnotationFinding]
    wrong_format: str | None


def audit_objects(
    flat: FlatObjects,
    sizes: np.ndarray,
    labels: Mapping[Any, int],
    subset: bool,
    box_format: str,
    unread: Sequence[AnnotationFinding] = (),
) -> ObjectAudit:
    """Looks at all objects of a split, given (H, W) of each image, int (rows, 2), 0 of one that cannot be read.

    With a `subset` of the categories, others are left out on purpose; `unread` are malformed and not among the objects.
    """
    objects, boxes, categories = flat.objects, flat.objects["boxes"], flat.categories.tolist()
    size = tuple(np.where(sizes > 0, sizes, np.inf)[flat.rows].T)  # infinite where it is not known
    sound, kept = usable(objects, size), trainable(objects, size)
    known = np.array([category in labels for category in categories], bool)
    meant = np.logical_or.reduce([~sound, *(objects[flag] for flag in ("iscrowd", "ignore") if flag in objects)])

    def findings(which: np.ndarray, reason: str, details: Sequence[Any]) -> list[AnnotationFinding]:
        places = np.flatnonzero(which).tolist()
        return [AnnotationFinding(int(flat.rows[i]), str(flat.ids[i]), reason, str(details[i])) for i in places]

    corners = boxes.tolist()
    unsound = "a box that is not four finite numbers, or is far outside of its image, or an infinite area"
    malformed = [
        *unread,
        *findings(~sound, unsound, corners),
        *findings(sound & ~known & (not subset), "a category that is none of the classes", categories),
    ]
    untrained = findings(~kept & ~meant, "a box outside of its image or thinner than a pixel, or an area of 0", corners)
    used = sound & known
    counts = np.bincount([labels[categories[i]] for i in np.flatnonzero(used)], minlength=len(labels))
    total, wrong = len(flat.rows) + len(unread), _wrong_format(boxes, size, box_format)
    return ObjectAudit(flat, used, counts, total, malformed, untrained, wrong)


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


def audit_lines(found: ObjectAudit, split: str, images: int, name: Callable[[int], str]) -> list[str]:
    """What `linvit data check` says of a split of so many images; `name` is what messages call that of a row."""
    flat = found.flat
    crowds = int(flat.objects["iscrowd"].sum()) if "iscrowd" in flat.objects else 0
    lines = [
        f"  {split:<10}{images:>12,} images, {images - len(np.unique(flat.rows)):,} of them without objects; "
        f"{len(flat.rows):,} objects, {crowds:,} of them crowds"
    ]
    if found.malformed:
        lines.append(f"  {split:<10}{len(found.malformed):>12,} of {found.total:,} ANNOTATIONS ARE MALFORMED")
        lines += [f"    {line}" for line in describe_findings(found.malformed, name)]
    if found.untrained:
        lines.append(f"  {split:<10}WARNING: training leaves out {len(found.untrained):,} objects")
        lines += [f"    {line}" for line in describe_findings(found.untrained, name)]
    return lines


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
