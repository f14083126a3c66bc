"""One annotation file of COCO: read entry by entry, checked, and put into a table with a row per image.

An annotation is an object only until it is in the columns; `json.load` would hold all 860,000 of COCO at once.
"""

import json
import re
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

import datasets
import numpy as np
import pyarrow as pa

from linvit import coco_masks
from linvit.data.sources.folder import path_column
from linvit.data.sources.read import MAX_PIXELS
from linvit.errors import UserError, some

SPACE = re.compile(r"[ \t\r\n]*")
INTEGERS, NUMBERS = datasets.List(datasets.Value("int64")), datasets.List(datasets.Value("float64"))
BOOLS, TEXTS = datasets.List(datasets.Value("bool")), datasets.List(datasets.Value("large_string"))
OBJECTS = {
    "id": INTEGERS,
    "bbox": datasets.List(NUMBERS),
    "category": INTEGERS,
    "area": NUMBERS,
    "iscrowd": BOOLS,
    "ignore": BOOLS,
}
IMAGES = {name: datasets.Value("int64") for name in ("image_id", "height", "width")}


class AnnotationFile:
    """What a file says.

    Args:
        path: Of the JSON file.
        masks: Whether masks are read, too.

    Attributes:
        images: Entry (id, file name, height, width) of each image.
        categories: Names by id.
        annotated: Whether there are annotations: files of test images have none.

    Raises:
        UserError: If it is no such file, ids come twice, or an annotation is malformed or of no image; names it.
    """

    def __init__(self, path: Path, masks: bool) -> None:
        self.path = path
        self.images: list[tuple[int, str, int, int]] = []
        self.categories: dict[int, str] = {}
        self.annotated = False
        self._masks = masks
        self._row: dict[int, int] = {}  # of the image of an id
        self._columns: dict[str, Any] = {
            **{name: array("q") for name in ("row", "id", "category")},
            **{name: array("d") for name in ("bbox", "area")},
            **{name: bytearray() for name in ("iscrowd", "ignore")},
            "segmentation": [],
        }
        try:
            text = path.read_text(encoding="utf-8")
            late = self._read(text, {"images", "categories", "annotations"})
            if late:  # annotations stand before their images
                self._read(text, {"annotations"})
        except (OSError, UnicodeDecodeError, RecursionError, json.JSONDecodeError, IndexError) as error:
            reason = "it ends early" if isinstance(error, IndexError) else str(error)
            raise UserError(f"cannot read '{path}' as COCO's annotations: {reason}") from error
        if not self.images:
            raise UserError(f"'{path}' has no images; COCO's annotations are lists of images, annotations, categories")
        self._check_ids()

    def table(self, folder: Path) -> datasets.Dataset:
        """A row per image, in the order of the file: `image`, `image_id`, `height`, `width`, `objects`."""
        paths = [str(folder.absolute() / name) for _, name, _, _ in self.images]
        numbers = np.array([(image, height, width) for image, _, height, width in self.images], np.int64)
        features = {"image": datasets.Image(), **IMAGES}
        columns = [path_column(paths), *map(pa.array, numbers.T)]
        if self.annotated:
            features["objects"] = dict(OBJECTS, **({"segmentation": TEXTS} if self._masks else {}))
            columns.append(self._objects(features["objects"]))
        features = datasets.Features(features)
        return datasets.Dataset(pa.Table.from_arrays(columns, schema=features.arrow_schema))

    def category_table(self) -> datasets.Dataset:
        """`id` and `name` of each category, in the order of the ids."""
        ids = sorted(self.categories)
        return datasets.Dataset.from_dict({"id": ids, "name": [self.categories[key] for key in ids]})

    def _objects(self, fields: dict[str, Any]) -> pa.StructArray:
        """The annotations of each image, in the order of the file."""
        rows = np.frombuffer(self._columns["row"], np.int64)
        order = np.argsort(rows, kind="stable")
        offsets = pa.array(np.searchsorted(rows[order], np.arange(len(self.images) + 1)).astype(np.int32))
        values: dict[str, np.ndarray] = {
            name: np.frombuffer(self._columns[name], np.int64)[order] for name in ("id", "category")
        }
        values["area"] = np.frombuffer(self._columns["area"], np.float64)[order]
        values |= {name: np.frombuffer(self._columns[name], bool)[order] for name in ("iscrowd", "ignore")}
        arrays = {name: pa.array(column) for name, column in values.items()}
        boxes = np.frombuffer(self._columns["bbox"], np.float64).reshape(-1, 4)[order]
        arrays["bbox"] = pa.ListArray.from_arrays(np.arange(len(boxes) + 1, dtype=np.int32) * 4, boxes.ravel())
        if self._masks:
            arrays["segmentation"] = pa.array([self._columns["segmentation"][i] for i in order], pa.large_string())
        lists = [pa.ListArray.from_arrays(offsets, arrays[name]) for name in fields]
        return pa.StructArray.from_arrays(lists, [*fields])

    def _read(self, text: str, wanted: set[str]) -> bool:
        """Takes in the entries of some lists; returns whether annotations were left out for want of images."""
        late = False
        for name, entry in entries(text):
            if name not in wanted:
                continue
            if name == "annotations" and not self.images:
                late = True
            elif name == "annotations":
                self._annotation(entry)
            elif not isinstance(entry, dict):
                raise UserError(f"an entry of {name} in '{self.path}' is no object: {entry!r}")
            elif name == "images":
                self._image(entry)
            else:
                self._category(entry)
        return late

    def _image(self, entry: dict[str, Any]) -> None:
        found: tuple[Any, ...] = tuple(entry.get(field) for field in ("id", "file_name", "height", "width"))
        key, name, height, width = found
        if not isinstance(name, str) or not all(is_whole(value) for value in (key, height, width)):
            raise UserError(
                f"image {entry.get('id')} in '{self.path}' needs id, height and width, whole numbers, and file_name"
            )
        if min(height, width) < 1 or height * width > 2 * MAX_PIXELS:
            raise UserError(f"image {key} ('{name}') in '{self.path}' has a size that cannot be: {width} x {height}")
        if key in self._row:
            raise UserError(f"two images in '{self.path}' have the id {key}; the second is '{name}'")
        self._row[key] = len(self.images)
        self.images.append((key, name, height, width))

    def _category(self, entry: dict[str, Any]) -> None:
        key, name = entry.get("id"), entry.get("name")
        if not is_whole(key) or not isinstance(name, str):
            raise UserError(f"a category in '{self.path}' needs an id, a whole number, and a name; got {entry}")
        if key in self.categories or name in self.categories.values():
            raise UserError(f"two categories in '{self.path}' have the id {key} or the name '{name}'")
        self.categories[key] = name

    def _annotation(self, entry: Any) -> None:
        self.annotated = True
        key = entry.get("id") if isinstance(entry, dict) else None
        try:
            row = self._row.get(entry["image_id"])
            if row is None:
                raise UserError(f"it belongs to image {entry['image_id']}, which is not in the list of images")
            box = [float(side) for side in entry["bbox"]]
            if len(box) != 4:
                raise UserError(f"its box has {len(box)} numbers")
            columns = self._columns
            values = {
                **{"row": row, "id": int(key), "category": int(entry["category_id"])},  # type: ignore[arg-type]
                "area": float("nan" if entry.get("area") is None else entry["area"]),  # NaN: it is the box's
                **{name: bool(entry.get(name, False)) for name in ("iscrowd", "ignore")},
            }
            if self._masks:
                counts = rle_counts(entry.get("segmentation"), self.images[row][2:])
                columns["segmentation"].append(counts)
        except (UserError, KeyError, TypeError, ValueError, OverflowError) as error:
            named = f"annotation {key}" + (f" of image {entry.get('image_id')}" if isinstance(entry, dict) else "")
            reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise UserError(f"{named} in '{self.path}' is malformed: {reason}. Mend or remove it") from error
        columns["bbox"].extend(box)
        for name, value in values.items():
            columns[name].append(value)

    def _check_ids(self) -> None:
        """Raises a `UserError` if annotations share an id."""
        ids, counts = np.unique(np.frombuffer(self._columns["id"], np.int64), return_counts=True)
        twice = [str(key) for key in ids[counts > 1].tolist()]
        if twice:
            raise UserError(f"ids of annotations in '{self.path}' come more than once: {some(twice)}. Number them anew")


def is_whole(value: Any) -> TypeGuard[int]:
    """Whether a value is a whole number that a table can hold."""
    return isinstance(value, int) and abs(value) < 2**63


def entries(text: str) -> Iterator[tuple[str, Any]]:
    """Yields the entries of all lists in a JSON object one by one, each with the name of its list.

    Raises:
        json.JSONDecodeError: If it is no JSON object.
        IndexError: If it ends early.
    """
    decode = json.JSONDecoder().raw_decode

    def after(at: int, sign: str = "") -> int:
        """The place of what follows some space, a sign, and more space."""
        at = SPACE.match(text, at).end()  # type: ignore[union-attr]
        if not text.startswith(sign, at):
            raise json.JSONDecodeError(f"expected '{sign}'", text, at)
        return SPACE.match(text, at + len(sign)).end()  # type: ignore[union-attr]

    def follows(at: int, end: str) -> int:
        """The place of the next of several parts, or of the end."""
        at = after(at)
        return at if text[at] == end else after(at, ",")

    at = after(0, "{")
    while text[at] != "}":
        name, at = decode(text, at)
        at = after(at, ":")
        if text[at] == "[":
            at = after(at, "[")
            while text[at] != "]":
                entry, at = decode(text, at)
                yield name, entry
                at = follows(at, "]")
            at += 1
        else:
            _, at = decode(text, at)
        at = follows(at, "}")


def rle_counts(segmentation: Any, size: tuple[int, int]) -> str:
    """The counts of the compressed RLE of a mask: of polygons, or of an RLE, compressed or not.

    Polygons of fewer than three corners are left out, as in mmdetection; of none of three the mask is empty.

    Raises:
        UserError: If there is no mask, it is malformed, or it has another size than its image.
    """
    if not segmentation:
        raise UserError("it has no segmentation; without --data.masks=true none is needed")
    if isinstance(segmentation, list):
        polygons = [polygon for polygon in segmentation if len(polygon) >= 6]
        rle = coco_masks.from_polygons(polygons, size) if polygons else coco_masks.compress([size[0] * size[1]], size)
    else:
        if list(segmentation["size"]) != list(size):
            raise UserError(f"its mask has [height, width] {segmentation['size']}, but its image {list(size)}")
        rle = segmentation
        if isinstance(rle["counts"], str | bytes):
            coco_masks.decode([rle])  # or it is malformed
        else:
            rle = coco_masks.compress(rle["counts"], size)
    counts: str | bytes = rle["counts"]
    return counts if isinstance(counts, str) else counts.decode("ascii")
