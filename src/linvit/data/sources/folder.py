"""Folders of images, and which of the folders are classes.

The `datasets` library takes minutes for a folder of ImageNet's size, since it asks for every file's size and date. The
order of images and their classes are the same; images are files of the formats that are read.
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pyarrow as pa
from lightning.pytorch.utilities import rank_zero_warn
from PIL import Image

from linvit.data.transforms.decode import FORMATS
from linvit.errors import UserError, quote_first

Image.init()
EXTENSIONS = tuple(ending for ending, kind in Image.registered_extensions().items() if kind in FORMATS)
TEXT = (".json", ".jsonl", ".csv", ".txt", ".md")
THREADS = 16  # folders that are read at once: on a network file system one waits for answers


class Listing(NamedTuple):
    """What lies directly in one folder, by names; `broken` are links that lead nowhere."""

    images: list[str]
    ignored: list[str]
    folders: list[str]
    broken: list[str]


class FoundClasses(NamedTuple):
    """Classes, sorted, none if there are no two; the splits whose images have classes; what may be wrong."""

    names: list[str]
    splits: set[str]
    warnings: list[str]


def image_folder(path: Path, splits: Mapping[str, Path]) -> dict[str, datasets.Dataset]:
    """The images below the folder of each split as tables, with their classes if they have such (`find_classes`)."""
    listings = {name: walk(folder) for name, folder in splits.items()}
    files = {name: paths for name, tree in listings.items() if (paths := _images(tree))}
    if not files:
        raise UserError(
            f"there are no images in '{path}'; expected one folder of images per class, under train/ and val/, or "
            f"images with masks in train/images and train/masks, val/images and val/masks"
        )
    classes = find_classes(listings, str(path))
    for warning in classes.warnings:
        rank_zero_warn(warning)
    number = {name: index for index, name in enumerate(classes.names)}
    kind = datasets.ClassLabel(names=classes.names)
    tables = {}
    for name, paths in files.items():
        own = [number[file.rsplit("/", 2)[1]] for file in paths] if name in classes.splits else None
        tables[name] = path_table({"image": paths}, {} if own is None else {"label": (kind, pa.array(own, pa.int64()))})
    return tables


def find_classes(trees: Mapping[str, Mapping[str, Listing]], source: str) -> FoundClasses:
    """The classes of a set, which are the names of the folders that its images lie in.

    The images of a split have classes if all lie equally deep, and below the folder of the split. A tree has the
    folders of a split by their paths, its own first.
    """
    names: set[str] = set()
    splits, warnings = set(), []
    for split, tree in trees.items():
        top = next(iter(tree)).count("/")
        filled = {folder.count("/") - top: folder for folder, listing in tree.items() if listing.images}
        if len(filled) > 1:
            warnings.append(
                f"the {split} images of '{source}' have no classes: they lie at different depths, such as in "
                f"'{filled[min(filled)]}' and in '{filled[max(filled)]}'"
            )
        depth = max(filled, default=1)
        if depth == 0 or len(filled) > 1:
            continue
        level = {folder: listing for folder, listing in tree.items() if folder.count("/") - top == depth}
        full = {folder.rpartition("/")[2] for folder, listing in level.items() if listing.images}
        names |= full
        splits |= {split} if full else set()
        empty = sorted(folder for folder, listing in level.items() if not listing.images)
        if empty:
            warnings.append(f"no images lie in {quote_first(empty)}: fill or remove these folders")
        above = {folder: listing for folder, listing in tree.items() if folder.count("/") - top == depth - 1}
        broken = sorted(f"{folder}/{name}" for folder, listing in above.items() for name in listing.broken)
        if broken:
            warnings.append(f"links lead nowhere: {quote_first(broken)}: repair or remove them")
    labelled = len(names) > 1
    return FoundClasses(sorted(names) if labelled else [], splits if labelled else set(), warnings)


def files_below(folder: Path) -> list[str]:
    """Paths of all images below a folder, sorted."""
    return _images(walk(folder))


def ignored_files(folder: Path) -> list[str]:
    """Paths of all files below a folder that nobody reads, such as HEIC images, sorted."""
    return sorted(f"{path}/{name}" for path, listing in walk(folder).items() for name in listing.ignored)


def path_table(
    images: Mapping[str, Sequence[str]], others: Mapping[str, tuple[Any, pa.Array]] | None = None
) -> datasets.Dataset:
    """A table of columns of images by their paths, and of others by their kind and values."""
    kinds, values = [*zip(*others.values(), strict=True)] if others else [(), ()]
    features = datasets.Features(dict.fromkeys(images, datasets.Image()) | dict(zip(others or (), kinds, strict=True)))
    try:
        stored = [
            pa.StructArray.from_arrays([pa.nulls(len(paths), pa.binary()), pa.array(paths)], ["bytes", "path"])
            for paths in images.values()
        ]
    except UnicodeEncodeError as error:
        raise UserError(
            f"the name of the file {error.object!r} is not UTF-8, which tables of paths need; rename it"
        ) from error
    return datasets.Dataset(pa.Table.from_arrays([*stored, *values], schema=features.arrow_schema))


def walk(folder: Path) -> dict[str, Listing]:
    """Every folder below one, itself included, that is neither hidden nor special; links are followed."""
    tree: dict[str, Listing] = {}
    level = [str(folder.absolute())]
    with ThreadPoolExecutor(THREADS) as pool:
        while level:
            tree |= zip(level, pool.map(_list, level), strict=True)
            level = [f"{folder}/{name}" for folder in level for name in tree[folder].folders]
    return tree


def _list(folder: str) -> Listing:
    found = Listing([], [], [], [])
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                name, lower = entry.name, entry.name.lower()
                if name.startswith("."):
                    continue
                if entry.is_dir():
                    if not name.startswith("__") and not (entry.is_symlink() and _leads_up(entry.path)):
                        found.folders.append(name)
                elif lower.endswith(EXTENSIONS):
                    found.images.append(name)
                elif entry.is_symlink() and not os.path.exists(entry.path):
                    found.broken.append(name)
                elif not lower.endswith(TEXT):
                    found.ignored.append(name)
    except OSError as error:
        raise UserError(
            f"cannot read the folder '{folder}': {error.strerror}. Its images would be missing without a word; "
            f"make it readable (chmod -R a+rX), or move it away"
        ) from error
    return found


def _leads_up(link: str) -> bool:
    """Whether a link leads to a folder that it lies in: following it would never end."""
    return f"{os.path.realpath(os.path.dirname(link))}/".startswith(f"{os.path.realpath(link)}/")


def _images(tree: Mapping[str, Listing]) -> list[str]:
    return sorted(f"{folder}/{name}" for folder, listing in tree.items() for name in listing.images)
