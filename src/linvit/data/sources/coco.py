"""Folders of images with COCO's annotation files: where these lie, and the splits as tables."""

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import datasets
from filelock import FileLock
from lightning.pytorch.utilities import rank_zero_info

from linvit.data.sources.coco_json import AnnotationFile, AnnotationFinding
from linvit.data.sources.folder import SETTLED, cache_folder, cached, keep
from linvit.data.sources.splits import SPLITS
from linvit.errors import UserError, check_choice, quote_first

VERSION = 2  # of the tables
UNSPLIT_NAMES = (
    "instances",
    "instances_default",
    "annotations",
    "_annotations.coco",
    "coco",
)  # names of a file without splits


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
    """The splits as tables.

    The tables are kept in the cache of `datasets` as long as the dates of annotation files and folders stay, so that
    loader processes and the next run share them from there. One process reads the files, others wait for it.
    """
    places = [(split, *map(str, map(Path.absolute, [file, *folders]))) for split, (file, folders) in files.items()]
    cache = cache_folder("coco", repr((VERSION, masks, places)))
    with _alone(cache):
        found = cached(cache, files)
        if found is None:
            found = _load(files, masks, cache)
    malformed = {split: [AnnotationFinding(**row) for row in found[f"{split} malformed"]] for split in files}
    return CocoTables({split: found[split] for split in files}, _categories(files, found), malformed)


def _load(files: Mapping[str, CocoFiles], masks: bool, cache: Path) -> dict[str, datasets.Dataset]:
    tables: dict[str, datasets.Dataset] = {}
    dates = {}
    for split, (annotations, folders) in files.items():
        started = time.time()
        read = AnnotationFile(annotations, masks)
        folder = _folder_of(read, folders, split)
        tables |= {split: read.table(folder), f"{split} malformed": _table(read.malformed, AnnotationFinding._fields)}
        tables[f"{split} categories"] = _table(sorted(read.categories.items()), ("id", "name"))
        dates[split] = {str(path.absolute()): os.stat(path).st_mtime_ns for path in (annotations, folder)}
        rank_zero_info(f"read '{annotations}' in {time.time() - started:.0f} s: {len(read.images)} images")
    newest = max(date for split in dates.values() for date in split.values()) / 1e9
    return keep(cache, dates, tables) if time.time() - newest > SETTLED else tables


def _table(rows: Sequence[Sequence[object]], names: Sequence[str]) -> datasets.Dataset:
    columns: Sequence[Sequence[object]] = [*zip(*rows, strict=True)] or [()] * len(names)
    return datasets.Dataset.from_dict(dict(zip(names, map(list, columns), strict=True)))


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


def _categories(files: Mapping[str, CocoFiles], tables: Mapping[str, datasets.Dataset]) -> dict[int, str]:
    """The names of the categories by id; a later split may lack some of the first."""
    first: dict[int, str] = {}
    for split in files:
        table = tables[f"{split} categories"]
        own = dict(zip(table["id"], table["name"], strict=True))
        first = first or own
        for key, name in own.items():
            if first.get(key) != name:
                raise UserError(
                    f"category {key} is '{name}' in '{files[split].annotations}', but {first.get(key, 'missing')!r} in "
                    f"'{next(iter(files.values())).annotations}'. Give all files the same categories"
                )
    return first


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


@contextmanager
def _alone(cache: Path) -> Iterator[None]:
    """Keeps other processes waiting, where the cache can be written."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = FileLock(cache / ".lock")
        lock.acquire()
    except OSError:
        yield
        return
    try:
        yield
    finally:
        lock.release()
