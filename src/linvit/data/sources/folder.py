"""Folders of images, and which of the folders are classes.

The `datasets` library takes minutes for a folder of ImageNet's size, since it asks for every file's size and date. The
order of images and their classes are the same; images are files of the formats that are read.
"""

import os
from collections.abc import Mapping, Sequence
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


class Listing(NamedTuple):
    """What lies directly in one folder, by names: images, and files that nobody reads."""

    images: list[str]
    ignored: list[str]


class FoundClasses(NamedTuple):
    """Classes, sorted, none if there are no two; the splits whose images have classes; what may be wrong."""

    names: list[str]
    splits: set[str]
    warnings: list[str]


def image_folder(path: Path, splits: Mapping[str, Path]) -> dict[str, datasets.Dataset]:
    """The images below the folder of each split as tables, with their classes if they have such (`find_classes`)."""
    trees = {name: walk(folder) for name, folder in splits.items()}
    files = {name: paths for name, tree in trees.items() if (paths := _images(tree))}
    if not files:
        raise UserError(
            f"there are no images in '{path}'; expected one folder of images per class, under train/ and val/, or "
            f"images with masks in train/images and train/masks, val/images and val/masks"
        )
    classes = find_classes(trees, str(path))
    for warning in classes.warnings:
        rank_zero_warn(warning)
    kind, tables = datasets.ClassLabel(names=classes.names), {}
    number = {name: index for index, name in enumerate(classes.names)}
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
        elif filled and 0 not in filled:
            names |= {folder.rpartition("/")[2] for folder, listing in tree.items() if listing.images}
            splits.add(split)
            depth = top + min(filled)
            if empty := sorted(f for f, listing in tree.items() if f.count("/") == depth and not listing.images):
                warnings.append(f"no images lie in {quote_first(empty)}: fill or remove these folders")
    return FoundClasses(sorted(names), splits, warnings) if len(names) > 1 else FoundClasses([], set(), warnings)


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

    def refuse(error: OSError) -> None:
        raise UserError(
            f"cannot read the folder '{error.filename}': {error.strerror}. Its images would be missing without a word; "
            f"make it readable (chmod -R a+rX), or move it away"
        ) from error

    tree = {}
    for path, folders, files in os.walk(folder.absolute(), onerror=refuse, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith((".", "__")) and not _leads_up(f"{path}/{name}")]
        shown = [name for name in files if not name.startswith(".")]
        images = [name for name in shown if name.lower().endswith(EXTENSIONS)]
        tree[path] = Listing(images, [name for name in shown if not name.lower().endswith((*EXTENSIONS, *TEXT))])
    return tree


def _leads_up(link: str) -> bool:
    """Whether a link leads to a folder that it lies in: following it would never end."""
    return os.path.islink(link) and f"{os.path.realpath(os.path.dirname(link))}/".startswith(
        f"{os.path.realpath(link)}/"
    )


def _images(tree: Mapping[str, Listing]) -> list[str]:
    return sorted(f"{folder}/{name}" for folder, listing in tree.items() for name in listing.images)
