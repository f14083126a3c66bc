"""Folders of images with COCO's annotation files: where these lie, and the splits as tables."""

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import datasets
from lightning.pytorch.utilities import rank_zero_info

from linvit.data.sources.coco_json import AnnotationFile, AnnotationFinding
from linvit.data.sources.splits import SPLITS
from linvit.errors import UserError, check_choice, quote_first

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
