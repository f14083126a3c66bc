"""The column of a table that says what is in its images: boxes, classes, masks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import datasets
import numpy as np
import pyarrow
import pyarrow.compute

from linvit.data.sources.coco_json import rle_counts
from linvit.data.sources.images import Sample, SampleReader, Target, check_target_sizes
from linvit.data.sources.labels import find_column
from linvit.data.sources.read import BadImageError
from linvit.data.transforms.detection import Objects, usable
from linvit.errors import UserError, check_choice

BoxFormat = Literal["xywh", "xyxy"]
OBJECT_COLUMNS = ("objects", "annotations", "object")
FIELDS = {  # usual names, of which COCO's table has the first
    "bbox": ("bbox", "bboxes", "boxes", "box"),
    "category": ("category", "categories", "category_id", "label", "labels", "class"),
    "id": ("id", "ids", "bbox_id", "annotation_id"),
    "area": ("area", "areas"),
    "iscrowd": ("iscrowd", "is_crowd"),
    "ignore": ("ignore",),
    "segmentation": ("segmentation", "segmentations"),
}


class ObjectColumn(NamedTuple):
    """Where a table has its objects: in a column of structs of lists, or of lists of structs.

    `fields` says what those of `FIELDS` are called; `names` are of the classes, if the column says them.
    """

    name: str
    fields: Mapping[str, str]
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
    fields = {
        field: next(alias for alias in usual if alias in kinds)
        for field, usual in FIELDS.items()
        if any(alias in kinds for alias in usual)
    }
    for field in ("bbox", "category"):
        if field not in fields:
            raise UserError(
                f"column '{name}' of data source '{source}' has no field '{field}'; it has: {', '.join(kinds)}"
            )
    kind = kinds[fields["category"]]
    kind = getattr(kind, "feature", kind)
    return ObjectColumn(name, fields, kind.names if isinstance(kind, datasets.ClassLabel) else None, box_format)


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
    compute = pyarrow.compute

    def values(field: str) -> pyarrow.Array:
        stored = column.fields[field]
        if pyarrow.types.is_struct(cells.type):
            return compute.list_flatten(compute.struct_field(cells, stored))
        return compute.struct_field(compute.list_flatten(cells), stored)

    lists = compute.struct_field(cells, column.fields["bbox"]) if pyarrow.types.is_struct(cells.type) else cells
    counts = compute.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False)
    where = np.repeat(np.arange(len(counts)), counts)
    boxes = values("bbox")
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
        lists = cell if isinstance(cell, dict) else {name: [one[name] for one in cell] for name in fields.values()}
        found = {field: lists.get(name) or [] for field, name in fields.items()}
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
            objects["rles"] = [
                _rle(found["segmentation"][i], size) for i, good in zip(kept, sound, strict=True) if good
            ]
        return objects


def _rle(stored: Any, size: tuple[int, int]) -> dict[str, Any]:
    """A mask as a table has it: counts of the image's size, as in COCO's table, or anything that COCO's files have."""
    counts = stored if isinstance(stored, str) else rle_counts(stored, size)
    return {"size": list(size), "counts": counts}


def identity(cell: Any, name: str) -> Any:
    """A cell as it is stored."""
    return cell


def object_targets(column: ObjectColumn, features: Mapping[str, Any]) -> dict[str, Target]:
    """What is read of a row: objects, and where the table says them the size and COCO's number of the image."""
    known = [name for name in ("height", "width", "image_id") if name in features]
    return {"objects": Target(column.name, identity), **{name: Target(name, identity) for name in known}}
