"""Folders of images with COCO's annotation files: finds the files, and reads them as tables."""

import json
import os
import re
import reprlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import datasets
import pyarrow as pa
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from linvit.data.sources.folder import holds_images, image_names, path_table
from linvit.data.sources.read import MAX_PIXELS
from linvit.data.sources.splits import SPLITS, by_alias
from linvit.errors import UserError, quote_first
from linvit.io import coco_masks
from linvit.io.reading import read_regular

Value = datasets.Value
OBJECT = {
    **{"id": Value("int64"), "bbox": datasets.List(Value("float64")), "category": Value("int64")},
    **{"area": Value("float64"), "iscrowd": Value("bool"), "ignore": Value("bool")},
}
LARGEST = 1e300  # upper limit of every number: JSON's integers are unbounded
UNSPLIT_NAMES = ("instances", "instances_default", "annotations", "_annotations.coco", "coco", "result")
"""Names of a file without splits; CVAT, Roboflow and Label Studio write the second, fourth and last."""
SPLIT_NAMES = {
    split: re.compile(rf"(instances_)?({'|'.join(aliases)})(\d{{4}})?", re.IGNORECASE)
    for split, aliases in SPLITS.items()
}
"""Names of the files and folders of each split, such as instances_train2017, Train and val2017."""


class AnnotationFinding(NamedTuple):
    """Finding about an annotation: row of its image (-1 without one), its id, the kind of problem, and details."""

    row: int
    id: Any
    reason: str
    detail: str = ""


class Malformed(Exception):  # noqa: N818 (it never leaves this file)
    """A reason, and perhaps a detail, why an entry cannot be used; see `AnnotationFinding`."""


def is_whole(value: Any) -> bool:
    """True if a value is a whole number of at most 64 bits."""
    return (isinstance(value, int) or (isinstance(value, float) and value.is_integer())) and abs(value) < 2**63


def is_number(value: Any) -> bool:
    """True if a value is a finite number."""
    return isinstance(value, (int, float)) and -LARGEST < value < LARGEST


Field = tuple[Callable[[Any], bool], str]
WHOLE: Field = is_whole, "a whole number"
TEXT: Field = (lambda value: isinstance(value, str)), "text"
FLAG: Field = (lambda value: value in (0, 1, None)), "0 or 1"
AREA: Field = (lambda value: value is None or is_number(value)), "a finite number"
BOX: Field = (
    (lambda value: isinstance(value, list) and len(value) == 4 and all(map(is_number, value))),
    ("four finite numbers"),
)
IMAGE = {"id": WHOLE, "height": WHOLE, "width": WHOLE, "file_name": TEXT}
CATEGORY = {"id": WHOLE, "name": TEXT}
ANNOTATION = {
    **{"id": WHOLE, "image_id": WHOLE, "category_id": WHOLE, "bbox": BOX, "area": AREA},
    **{"iscrowd": FLAG, "ignore": FLAG},
}
"""Test of a field's value, and a description of the valid values."""


def check_fields(entry: Any, fields: Mapping[str, Field]) -> None:
    """Raises `Malformed` unless an entry has some fields, of their kinds."""
    if not isinstance(entry, dict):
        raise Malformed("an entry that is not an object of JSON", reprlib.repr(entry))
    for name, (fits, kind) in fields.items():
        if not fits(entry.get(name)):
            raise Malformed(f"a field {name} that is not {kind}", reprlib.repr(entry.get(name)))


class AnnotationFile:
    """Content of a JSON file of COCO, with or without `masks`; annotations that are `malformed` are in no row."""

    def __init__(self, path: Path, masks: bool) -> None:
        self.path, self.masks = path, masks
        self.malformed: list[AnnotationFinding] = []
        try:
            content = json.loads(read_regular(path))
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"cannot read '{path}' as COCO's annotations: {error}") from error
        names = ("images", "categories", "annotations")
        lists = [content.get(name) or [] for name in names] if isinstance(content, dict) else [[]]
        if not lists[0] or not all(isinstance(one, list) for one in lists):
            raise UserError(
                f"'{path}' has no images; COCO's annotations are lists of images, annotations, categories. Export the "
                f"annotations for COCO, not in another JSON"
            )
        self.images = self._entries(lists[0], "images", IMAGE)
        for image in self.images:
            image["file_name"] = os.path.normpath(image["file_name"].replace("\\", "/"))  # Windows' separators
            height, width = image["height"], image["width"]
            if min(height, width) < 1 or height * width > 2 * MAX_PIXELS:
                raise UserError(f"'{image['file_name']}' in '{path}' has a size that cannot be: {width} x {height}")
        categories = self._entries(lists[1], "categories", CATEGORY)
        self.categories = dict(sorted((int(entry["id"]), entry["name"]) for entry in categories))
        if masks and lists[2]:
            coco_masks.area([coco_masks.compress([1], (1, 1))])  # or the library is missing
        self.objects = self._annotations(lists[2]) if lists[2] else None  # files of test images have none

    def table(self, paths: Sequence[str]) -> datasets.Dataset:
        """Returns a row per image, in the order of the paths: `image`, `image_id`, `height`, `width`, `objects`."""
        columns: dict[str, tuple[Any, pa.Array]] = {
            name: (Value("int64"), pa.array([int(image[field]) for image in self.images]))
            for name, field in (("image_id", "id"), ("height", "height"), ("width", "width"))
        }
        if self.objects is not None:
            kind = datasets.List(OBJECT | ({"segmentation": Value("large_string")} if self.masks else {}))
            arrow = datasets.Features({"objects": kind}).arrow_schema.field("objects").type
            columns["objects"] = kind, pa.array(self.objects, arrow)
        return path_table({"image": paths}, columns)

    def paths(self, folder: Path) -> list[str]:
        """Returns paths of the images, in the order of the file; raises a `UserError` if two images are one file."""
        paths = [os.path.normpath(os.path.join(folder.absolute(), image["file_name"])) for image in self.images]
        first: dict[str, Any] = {}
        twice = []
        for path, image in zip(paths, self.images, strict=True):
            if (other := first.setdefault(path, image["id"])) != image["id"]:
                twice.append(f"{image['file_name']} ({other} and {image['id']})")
        if twice:
            raise UserError(
                f"{len(twice)} files in '{self.path}' are two images each, such as {twice[0]}: in "
                f"either, the objects of the other would be trained as background. Give the annotations of both one "
                f"image_id, and remove the other entry of images"
            )
        return paths

    def _entries(self, entries: list[Any], what: str, fields: Mapping[str, Field]) -> list[dict[str, Any]]:
        """Returns the entries that have the fields; ids, and names if there are any, are unique."""
        for entry in entries:
            try:
                check_fields(entry, fields)
            except Malformed as error:
                raise UserError(f"one of the {what} in '{self.path}' has {': '.join(error.args)}") from error
        for name in {"id", "name"} & fields.keys():
            value, count = Counter(entry[name] for entry in entries).most_common(1)[0] if entries else (None, 0)
            if count > 1:
                raise UserError(f"{count} entries of {what} in '{self.path}' have the {name} {value}")
        return entries

    def _annotations(self, entries: list[Any]) -> list[list[dict[str, Any]]]:
        """Returns the objects of each image, without annotations that are malformed."""
        rows, ids = {image["id"]: row for row, image in enumerate(self.images)}, set()
        objects: list[list[dict[str, Any]]] = [[] for _ in self.images]
        for entry in entries:
            given: dict[str, Any] = entry if isinstance(entry, dict) else {}
            image, key = given.get("image_id"), given.get("id")
            row = rows.get(image, -1) if is_whole(image) else -1
            try:
                check_fields(entry, ANNOTATION)
                if row < 0:
                    raise Malformed("an image_id that no image has", repr(image))
                if key in ids:
                    raise Malformed("an id that another annotation has")
                counts = self._counts(given.get("segmentation"), row) if self.masks else None
            except Malformed as error:
                self.malformed.append(AnnotationFinding(row, reprlib.repr(key), *error.args))
                continue
            ids.add(key)
            area = None if given.get("area") is None else float(given["area"])
            one = {"id": int(given["id"]), "bbox": [*map(float, given["bbox"])], "category": int(given["category_id"])}
            flags = {name: bool(given.get(name)) for name in ("iscrowd", "ignore")}
            objects[row].append({**one, **flags, "area": area, "segmentation": counts})
        return objects

    def _counts(self, segmentation: Any, row: int) -> str:
        if not segmentation:
            raise Malformed("an empty segmentation" if segmentation is not None else "no segmentation")
        try:
            return rle_counts(segmentation, (self.images[row]["height"], self.images[row]["width"]))
        except (UserError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise Malformed("a malformed segmentation", f"{type(error).__name__ * (not str(error))}{error}") from error


def rle_counts(segmentation: Any, size: tuple[int, int]) -> str:
    """Returns the counts of the compressed RLE of a mask (H, W): of polygons, or of an RLE, compressed or not.

    Polygons of fewer than three corners are left out, as in mmdetection; if all are, the mask is empty.
    """
    if isinstance(segmentation, list):
        if not all(isinstance(polygon, list) for polygon in segmentation):
            raise UserError("polygons are lists in a list: [[x1, y1, x2, y2, x3, y3, ...], ...]")
        polygons = [polygon for polygon in segmentation if len(polygon) >= 6]
        rle = coco_masks.from_polygons(polygons, size) if polygons else coco_masks.compress([size[0] * size[1]], size)
    else:
        rle = segmentation
        if list(rle["size"]) != list(size):
            raise UserError(f"its mask has [height, width] {rle['size']}, but its image {list(size)}")
        if isinstance(rle["counts"], str | bytes):
            coco_masks.decode([rle])  # or it is malformed
        else:
            rle = coco_masks.compress(rle["counts"], size)
    counts: str | bytes = rle["counts"]
    return counts if isinstance(counts, str) else counts.decode("ascii")


def mask_counts(stored: Any, size: tuple[int, int]) -> str | None:
    """Returns the counts of the compressed RLE of a stored mask (H, W), or None if it is missing or malformed."""
    try:
        return stored if isinstance(stored, str) else rle_counts(stored, size)  # COCO's table has text
    except (UserError, KeyError, TypeError, ValueError, OverflowError):
        return None


class CocoTables(NamedTuple):
    """A table of each split with a row per image, names of categories by id, and annotations that are in no table."""

    splits: dict[str, datasets.Dataset]
    categories: dict[int, str]
    malformed: dict[str, list[AnnotationFinding]]


def load_coco(path: Path, masks: bool) -> CocoTables | None:
    """Returns the splits of a folder with COCO's annotation files, as tables; None if it has no such files."""
    files = find_coco(path)
    if not files:
        return None
    tables, malformed, used = {}, {}, set[str]()
    categories: dict[int, str] = {}
    for split, file in files.items():
        started = time.time()
        read = AnnotationFile(file, masks)
        for key, name in read.categories.items():
            if categories and categories.get(key) != name:
                raise UserError(
                    f"category {key} is '{name}' in '{file}', but {categories.get(key, 'missing')!r} in another split. "
                    f"Give all files the same categories"
                )
        categories = categories or read.categories
        images = read.paths(_image_folder(path, split, read))
        tables[split], malformed[split] = read.table(images), read.malformed
        used.update(images)
        rank_zero_info(f"read '{file}' in {time.time() - started:.0f} s: {len(read.images)} images")
    _tell_left_out(path, files, used)
    return CocoTables(tables, categories, malformed)


def find_coco(path: Path) -> dict[str, Path]:
    """Returns the annotation files of the splits of a folder by their names; none if there are none.

    Known are COCO's own names (`annotations/instances_train2017.json` and `train2017/`), a file per split
    (`train.json`, `annotations/train.json`, `train/_annotations.coco.json`) beside a folder `train/` or `images/`, and
    one file (`annotations.json`), which is train.
    """
    found = {split: files[0] for split, files in _split_files(path).items()}
    whole = (place / f"{name}.json" for place in (path / "annotations", path) for name in UNSPLIT_NAMES)
    alone = next((file for file in whole if file.is_file()), None)
    return found or ({} if alone is None else {"train": alone})


def _split_files(path: Path) -> dict[str, list[Path]]:
    """Returns all annotation files of each split that has any; the first one is read."""
    folders = by_alias(sorted(os.listdir(path)))
    places = [file for place in (path / "annotations", path) for file in sorted(place.glob("*.json"))]
    found = {}
    for split in SPLITS:
        files = [file for file in places if SPLIT_NAMES[split].fullmatch(file.stem)]
        within = [path / folder / f"{whole}.json" for folder in folders.get(split, ()) for whole in UNSPLIT_NAMES]
        if files := [file for file in [*files, *within] if file.is_file()]:
            found[split] = files
    return found


def _tell_left_out(path: Path, files: Mapping[str, Path], used: Set[str]) -> None:
    """Warns of annotation files that are not read and of images that none lists; a `UserError` if all are of `val`."""
    for split, others in _split_files(path).items():
        if len(others) > 1:
            rank_zero_warn(
                f"'{path}' has several annotation files of the {split} split: '{files[split]}' is read, and left out "
                f"are {quote_first([*map(str, others[1:])])}"
            )
    folders = {os.path.dirname(image) for image in used}
    beside = (each for place in (path, path / "images") for each in place.glob("*"))
    for folder in [] if "val" in files else [each for each in beside if SPLIT_NAMES["val"].fullmatch(each.name)]:
        if holds_images(folder) and not any(Path(one).is_relative_to(folder.absolute()) for one in folders):
            raise UserError(
                f"the images in '{folder}' have no annotation file, such as "
                f"'{path / 'annotations' / f'instances_{folder.name}.json'}'. Put it there, or move the folder away: "
                f"then a fraction of the training images is held out (--data.val_fraction)"
            )
    images = (os.path.join(folder, name) for folder in sorted(folders) for name in image_names(folder))
    if lacking := [image for image in images if image not in used]:
        rank_zero_warn(
            f"{len(lacking)} images beside those of '{path}' are left out, since no annotation file lists them: "
            f"{quote_first(lacking)}"
        )


def _alike(name: str) -> str:
    """Returns a name in lower case with %20 as a space, to find the intended file."""
    return unquote(name).casefold()


def _image_folder(path: Path, split: str, read: AnnotationFile) -> Path:
    """Returns the folder with the images of an annotation file; a `UserError` names those that are not there."""
    names = [image["file_name"] for image in read.images]
    parts = [os.path.split(name) for name in names]
    near = (path / "images", path / "data", read.path.parent, path)
    folders = [
        place
        for name in (read.path.stem.removeprefix("instances_"), *SPLITS[split])
        for place in (path / name, path / "images" / name, path / name / "images")
    ]
    missing: dict[Path, list[str]] = {}
    for folder in filter(os.path.isdir, (*folders, *near)):
        found = {below: os.path.join(folder, below) for below in {below for below, _ in parts}}
        listed = {below: {*os.listdir(place)} if os.path.isdir(place) else set() for below, place in found.items()}
        missing[folder] = [name for name, (below, file) in zip(names, parts, strict=True) if file not in listed[below]]
        if not missing[folder]:
            return folder
    for folder in missing:
        there = {_alike(name): name for name in os.listdir(folder)}
        if all(_alike(file) in there for _, file in parts):
            raise UserError(
                f"'{read.path}' has the file_name '{names[0]}', but the file is "
                f"'{folder / there[_alike(parts[0][1])]}': write names as they are below '{folder}'"
            )
    folder, absent = min(missing.items(), key=lambda item: len(item[1]))
    some = len(absent) < len(names)
    where = f"'{folder}'" if some else f"any of the folders {quote_first([*map(str, missing)])}"
    way = (
        "Add them, or remove them from the file"
        if some
        else f"Put them into '{folders[0]}', or link their folder there"
    )
    raise UserError(
        f"{len(absent)} of the {len(names)} images of '{read.path}' are not in {where}: {quote_first(absent)}. {way}"
    )
