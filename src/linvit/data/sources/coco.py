"""Folders of images with COCO's annotation files: where these lie, and what they say, as tables."""

import json
import os
import re
import reprlib
import time
from collections import Counter
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
from lightning.pytorch.utilities import rank_zero_info

from linvit import coco_masks
from linvit.data.sources.folder import path_table
from linvit.data.sources.read import MAX_PIXELS
from linvit.data.sources.splits import SPLITS
from linvit.errors import UserError, check_choice, quote_first

INTEGERS, NUMBERS = datasets.List(datasets.Value("int64")), datasets.List(datasets.Value("float64"))
BOOLS, TEXTS = datasets.List(datasets.Value("bool")), datasets.List(datasets.Value("large_string"))
OBJECT_FEATURES = {
    "id": INTEGERS,
    "bbox": datasets.List(NUMBERS),
    "category": INTEGERS,
    "area": NUMBERS,
    "iscrowd": BOOLS,
    "ignore": BOOLS,
}
LARGEST = 1e300  # what a number may be below, of any kind: JSON's integers have no end


class AnnotationFinding(NamedTuple):
    """Something about an annotation: the row of its image, -1 without one, its id, a shared reason, and details."""

    row: int
    id: Any
    reason: str
    detail: str = ""


class AnnotationFile:
    """What a JSON file of COCO says: images (id, file name, height, width), names of categories by id, annotations.

    With `masks`, these are read, too. Annotations that are `malformed` are in no row of the table.
    """

    def __init__(self, path: Path, masks: bool) -> None:
        self.path = path
        self.malformed: list[AnnotationFinding] = []
        self._masks = masks
        try:
            content = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"cannot read '{path}' as COCO's annotations: {error}") from error
        names = ("images", "categories", "annotations")
        lists = [content.get(name) or [] for name in names] if isinstance(content, dict) else [[]]
        if not lists[0] or not all(isinstance(one, list) for one in lists):
            raise UserError(f"'{path}' has no images; COCO's annotations are lists of images, annotations, categories")
        images = self._entries(lists[0], "images", {"id": int, "height": int, "width": int, "file_name": str})
        self.images = [(key, name, height, width) for key, height, width, name in images]
        for key, name, height, width in self.images:
            if min(height, width) < 1 or height * width > 2 * MAX_PIXELS:
                raise UserError(f"image {key} ('{name}') in '{path}' has a size that cannot be: {width} x {height}")
        self._rows = {entry[0]: row for row, entry in enumerate(self.images)}  # of the image of an id
        categories = self._entries(lists[1], "categories", {"id": int, "name": str})
        self.categories: dict[int, str] = dict(categories)
        if masks and lists[2]:
            coco_masks.area([coco_masks.compress([1], (1, 1))])  # or the library is missing
        self._objects = self._annotations(lists[2]) if lists[2] else None

    def table(self, folder: Path) -> datasets.Dataset:
        """A row per image, in the order of the file: `image`, `image_id`, `height`, `width`, `objects`."""
        paths = [str(folder.absolute() / name) for _, name, _, _ in self.images]
        others: dict[str, tuple[Any, pa.Array]] = {
            name: (datasets.Value("int64"), pa.array([entry[place] for entry in self.images], pa.int64()))
            for name, place in (("image_id", 0), ("height", 2), ("width", 3))
        }
        if self._objects is not None:  # files of test images have none
            kinds = OBJECT_FEATURES | ({"segmentation": TEXTS} if self._masks else {})
            arrow = datasets.Features(kinds).arrow_schema
            rows, *values = self._objects
            offsets = pa.array(np.searchsorted(rows, np.arange(len(self.images) + 1)), pa.int32())
            lists = [
                pa.ListArray.from_arrays(offsets, pa.array(column, field.type.value_type))
                for column, field in zip(values, arrow, strict=False)
            ]
            others["objects"] = kinds, pa.StructArray.from_arrays(lists, arrow.names)
        return path_table({"image": paths}, others)

    def _entries(self, entries: list[Any], what: str, wanted: Mapping[str, type]) -> list[tuple[Any, ...]]:
        """The wanted fields of all entries, whole numbers or text."""
        found = []
        for entry in entries:
            values = [entry.get(name) if isinstance(entry, dict) else None for name in wanted]
            pairs = [*zip(values, wanted.values(), strict=True)]
            if not all(isinstance(one, str) if kind is str else is_whole(one) for one, kind in pairs):
                needed = ", ".join(
                    f"{name} ({'text' if kind is str else 'a whole number'})" for name, kind in wanted.items()
                )
                raise UserError(f"each of the {what} in '{self.path}' needs {needed}; got {reprlib.repr(entry)}")
            found.append(tuple(kind(one) for one, kind in pairs))
        for place, name in enumerate(wanted):
            most = Counter(one[place] for one in found).most_common(1)
            if name in ("id", "name") and most and most[0][1] > 1:
                raise UserError(f"{most[0][1]} entries of {what} in '{self.path}' have the {name} {most[0][0]}")
        return found

    def _annotations(self, entries: list[Any]) -> list[Any]:
        """Columns of the row and the fields of all annotations that are not malformed, in the order of the rows."""
        kept, ids = [], set()
        for entry in entries:
            fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
            key, image = fields.get("id"), fields.get("image_id")
            row = -1 if image is None or not is_whole(image) else self._rows.get(image, -1)
            try:
                _check_fields(entry)
                if row < 0:
                    raise Malformed("an image_id that no image has", repr(image))
                if key in ids:
                    raise Malformed("an id that another annotation has")
                counts = self._counts(fields.get("segmentation"), row) if self._masks else None
            except Malformed as error:
                self.malformed.append(AnnotationFinding(row, reprlib.repr(key), *error.args))
                continue
            ids.add(key)
            area = float("nan") if fields.get("area") is None else float(fields["area"])  # NaN: it is the box's
            known = (int(fields["id"]), [*map(float, fields["bbox"])], int(fields["category_id"]), area)
            kept.append((row, *known, bool(fields.get("iscrowd")), bool(fields.get("ignore")), counts))
        kept.sort(key=itemgetter(0))
        return [*zip(*kept, strict=True)] if kept else [()] * 8

    def _counts(self, segmentation: Any, row: int) -> str:
        if not segmentation:
            raise Malformed("an empty segmentation" if segmentation is not None else "no segmentation")
        try:
            return rle_counts(segmentation, self.images[row][2:])
        except (UserError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise Malformed("a malformed segmentation", f"{type(error).__name__ * (not str(error))}{error}") from error


class Malformed(Exception):  # noqa: N818 (it never leaves this file)
    """A reason, and perhaps a detail, why an annotation cannot be used; see `AnnotationFinding`."""


def _check_fields(entry: Any) -> None:
    """Raises `Malformed` unless an annotation has the fields of COCO, of their types."""
    if not isinstance(entry, dict):
        raise Malformed("an entry that is not an object of JSON", reprlib.repr(entry))
    box, area = entry.get("bbox"), entry.get("area")
    for name in ("id", "image_id", "category_id"):
        if not is_whole(entry.get(name)):
            raise Malformed(f"no whole number as {name}", reprlib.repr(entry.get(name)))
    if not isinstance(box, list) or len(box) != 4 or not all(map(is_number, box)):
        raise Malformed("a bbox that is not four finite numbers", reprlib.repr(box))
    if area is not None and not is_number(area):
        raise Malformed("an area that is not a finite number", reprlib.repr(area))
    for name in ("iscrowd", "ignore"):
        if entry.get(name) not in (0, 1, None):
            raise Malformed(f"another value than 0 or 1 as {name}", reprlib.repr(entry[name]))


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number that a table can hold."""
    return (isinstance(value, int) or (isinstance(value, float) and value.is_integer())) and abs(value) < 2**63


def is_number(value: Any) -> bool:
    """Whether a value is a finite number."""
    return isinstance(value, (int, float)) and -LARGEST < value < LARGEST


def rle_counts(segmentation: Any, size: tuple[int, ...]) -> str:
    """The counts of the compressed RLE of a mask (H, W): of polygons, or of an RLE, compressed or not.

    Polygons of fewer than three corners are left out, as in mmdetection; of none of three the mask is empty.
    """
    height, width = size
    if isinstance(segmentation, list):
        if not all(isinstance(polygon, list) for polygon in segmentation):
            raise UserError("polygons are lists in a list: [[x1, y1, x2, y2, x3, y3, ...], ...]")
        polygons = [polygon for polygon in segmentation if len(polygon) >= 6]
        whole = (height, width)
        rle = coco_masks.from_polygons(polygons, whole) if polygons else coco_masks.compress([height * width], whole)
    else:
        if list(segmentation["size"]) != list(size):
            raise UserError(f"its mask has [height, width] {segmentation['size']}, but its image {list(size)}")
        rle = segmentation
        if isinstance(rle["counts"], str | bytes):
            coco_masks.decode([rle])  # or it is malformed
        else:
            rle = coco_masks.compress(rle["counts"], (height, width))
    counts: str | bytes = rle["counts"]
    return counts if isinstance(counts, str) else counts.decode("ascii")


UNSPLIT_NAMES = ("instances", "instances_default", "annotations", "_annotations.coco", "coco")
"""Names of a file without splits."""


class CocoFiles(NamedTuple):
    """A split: its annotation file, and the folders where its images may lie."""

    annotations: Path
    folders: list[Path]


def find_coco(
    path: Path,
    annotation_files: Mapping[str, str] | None = None,
    image_folders: Mapping[str, str] | None = None,
) -> dict[str, CocoFiles]:
    """The annotation files of the splits of a folder; none if there are none.

    Known are COCO's own names (`annotations/instances_train2017.json` and `train2017/`), a file per split
    (`train.json`, `annotations/train.json`, `train/_annotations.coco.json`) beside a folder `train/` or `images/`, and
    one file (`annotations.json`), which is train. Files and folders of splits that are given are not looked for.
    """
    for option, given in (("annotation_files", annotation_files), ("image_folders", image_folders)):
        for split in given or {}:
            check_choice(f"a split of {option}", split, SPLITS)
    if annotation_files:
        found = {split: Path(file).expanduser() for split, file in annotation_files.items()}
        for split, file in found.items():
            if not file.is_file():
                raise UserError(f"there is no file '{file}' (--data.annotation_files, {split})")
    else:
        found = _by_name(path)
    folders = {split: Path(folder).expanduser() for split, folder in (image_folders or {}).items()}
    return {
        split: CocoFiles(file, [folders[split]] if split in folders else _folders(path, split, file))
        for split, file in found.items()
    }


class CocoTables(NamedTuple):
    """A table of each split with a row per image, names of categories by id, and annotations that are in no table."""

    splits: dict[str, datasets.Dataset]
    categories: dict[int, str]
    malformed: dict[str, list[AnnotationFinding]]


def load_coco(files: Mapping[str, CocoFiles], masks: bool) -> CocoTables:
    """The splits as tables."""
    tables, categories, malformed = {}, {}, {}
    for split, (annotations, folders) in files.items():
        started = time.time()
        read = AnnotationFile(annotations, masks)
        tables[split] = read.table(_folder_of(read, folders, split))
        categories[split], malformed[split] = dict(sorted(read.categories.items())), read.malformed
        rank_zero_info(f"read '{annotations}' in {time.time() - started:.0f} s: {len(read.images)} images")
    return CocoTables(tables, _same_categories(files, categories), malformed)


def _folder_of(read: AnnotationFile, folders: list[Path], split: str) -> Path:
    """The folder with the images of a file."""
    names = [name for _, name, _, _ in read.images]
    folder = next((folder for folder in folders if (folder / names[0]).is_file()), None)
    if folder is None:
        raise UserError(
            f"'{names[0]}', the first image of '{read.path}', is in none of {quote_first([*map(str, folders)])}; say "
            f'where its images are: --data.image_folders=\'{{"{split}": "path/to/folder"}}\''
        )
    present = {below: set(os.listdir(below)) for below in {(folder / name).parent for name in names} if below.is_dir()}
    missing = [name for name in names if Path(name).name not in present.get((folder / name).parent, ())]
    if missing:
        raise UserError(
            f"{len(missing)} of the {len(names)} images of '{read.path}' are not in '{folder}': "
            f"{quote_first(missing)}. Add them, or remove them from the file"
        )
    return folder


def _same_categories(files: Mapping[str, CocoFiles], names: Mapping[str, dict[int, str]]) -> dict[int, str]:
    """The names of the categories by id, of which a later split may lack some."""
    (first, known), *others = names.items()
    for split, own in others:
        for key, name in own.items():
            if known and known.get(key) != name:
                raise UserError(
                    f"category {key} is '{name}' in '{files[split].annotations}', but {known.get(key, 'missing')!r} in "
                    f"'{files[first].annotations}'. Give all files the same categories"
                )
        known = known or own
    return known


def _by_name(path: Path) -> dict[str, Path]:
    """The annotation files of the splits by their names."""
    places = [path / "annotations", path]
    found = {}
    for split, aliases in SPLITS.items():
        name = re.compile(rf"(instances_)?({'|'.join(aliases)})(\d{{4}})?")
        within = [path / alias / f"{whole}.json" for alias in aliases for whole in UNSPLIT_NAMES]
        files = [file for place in places for file in sorted(place.glob("*.json")) if name.fullmatch(file.stem)]
        files = [file for file in [*files, *within] if file.is_file()]
        if files:
            found[split] = files[0]
    whole = (place / f"{name}.json" for place in places for name in UNSPLIT_NAMES)
    alone = next((file for file in whole if file.is_file()), None)
    return found or ({} if alone is None else {"train": alone})


def _folders(path: Path, split: str, file: Path) -> list[Path]:
    """Folders in which the images of a split may lie, the most likely first."""
    stem = file.stem.removeprefix("instances_")
    names = [stem, *(alias for alias in SPLITS[split])]
    near = [folder for name in names for folder in (path / name, path / "images" / name, path / name / "images")]
    return [folder for folder in [*near, path / "images", file.parent, path] if folder.is_dir()]
