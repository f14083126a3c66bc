"""A column of objects in a table: boxes, classes and masks, and the samples made from them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from linvit.data.sources.coco import mask_counts
from linvit.data.sources.images import Sample, SampleReader, check_target_sizes
from linvit.data.sources.labels import find_column
from linvit.data.sources.read import BadImageError
from linvit.data.transforms.detection import Objects, usable
from linvit.errors import UserError, check_choice

BoxFormat = Literal["xywh", "xyxy"]
OBJECT_COLUMNS = ("objects", "annotations", "object")
FIELDS = ("bbox", "category", "id", "area", "iscrowd", "ignore", "segmentation")


class ObjectColumn(NamedTuple):
    """Column with a table's objects, structs of lists or lists of structs; `names` of the classes, if known."""

    name: str
    fields: list[str]
    names: list[str] | None
    box_format: str

    def lists(self, cell: Any, place: str) -> dict[str, list[Any]]:
        """Returns the values of each field of the objects in a cell."""
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
    """Turns a row with objects into a sample; leaves out objects whose category has no label."""

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
