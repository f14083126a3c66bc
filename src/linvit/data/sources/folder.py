"""Folders of images, and which of the folders are classes.

The `datasets` library takes minutes for a folder of ImageNet's size, since it asks for every file's size and date. The
order of images and their classes are the same; images are files of the formats that are read.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
from lightning.pytorch.utilities import rank_zero_warn
from PIL import Image

from linvit.data.transforms.decode import FORMATS
from linvit.errors import UserError, quote_first

Image.init()
EXTENSIONS = tuple(ending for ending, kind in Image.registered_extensions().items() if kind in FORMATS)
TEXT = (".json", ".jsonl", ".csv", ".txt", ".md")


def image_folder(path: Path, splits: Mapping[str, Path]) -> dict[str, datasets.Dataset]:
    """The images below the folder of each split as tables, with classes, which are the folders that they lie in.

    The images of a split have classes if all lie equally deep, and below the folder of the split; a single class is
    none.
    """
    trees = {split: walk(folder) for split, folder in splits.items()}
    files = {split: paths for split, tree in trees.items() if (paths := _images(tree))}
    if not files:
        raise UserError(
            f"there are no images in '{path}'; expected one folder of images per class, under train/ and val/, or "
            f"images with masks in train/images and train/masks, val/images and val/masks"
        )
    classes: dict[str, list[str]] = {}  # the class of each image
    for split, paths in files.items():
        parents = dict.fromkeys(map(os.path.dirname, paths))
        depths = {parent.count("/"): parent for parent in parents}
        if len(depths) > 1:
            where = f"'{depths[min(depths)]}' and in '{depths[max(depths)]}'"
            rank_zero_warn(
                f"the {split} images of '{path}' have no classes: they lie at different depths, such as in {where}"
            )
        elif next(iter(trees[split])) not in parents:
            classes[split] = [file.rsplit("/", 2)[1] for file in paths]
            if empty := sorted(below for below in trees[split].keys() - parents.keys() if below.count("/") in depths):
                rank_zero_warn(f"no images lie in {quote_first(empty)}: fill or remove these folders")
    names = sorted({name for own in classes.values() for name in own})
    kind, tables = datasets.ClassLabel(names=names), {}
    number = {name: index for index, name in enumerate(names)}
    for split, paths in files.items():
        own = [number[name] for name in classes.get(split, [])] if len(names) > 1 else []
        tables[split] = path_table({"image": paths}, {"label": (kind, pa.array(own, pa.int64()))} if own else {})
    return tables


def files_below(folder: Path) -> list[str]:
    """Paths of all images below a folder, sorted."""
    return _images(walk(folder))


def ignored_files(folder: Path) -> list[str]:
    """Paths of all files below a folder that nobody reads, such as HEIC images, sorted."""
    read = (*EXTENSIONS, *TEXT)
    tree = walk(folder).items()
    return sorted(f"{path}/{name}" for path, names in tree for name in names if not name.lower().endswith(read))


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


def walk(folder: Path) -> dict[str, list[str]]:
    """The files of every folder below one, itself first, that is neither hidden nor special; links are followed.

    Paths have slashes, also under Windows.
    """

    def refuse(error: OSError) -> None:
        raise UserError(
            f"cannot read the folder '{error.filename}': {error.strerror}. Its images would be missing without a word; "
            f"make it readable (chmod -R a+rX), or move it away"
        ) from error

    tree = {}
    for path, folders, files in os.walk(folder.absolute(), onerror=refuse, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith((".", "__")) and not _leads_up(f"{path}/{name}")]
        tree[Path(path).as_posix()] = [name for name in files if not name.startswith(".")]
    return tree


def _leads_up(link: str) -> bool:
    """Whether a link leads to a folder that it lies in: following it would never end."""
    return os.path.islink(link) and Path(os.path.realpath(os.path.dirname(link))).is_relative_to(os.path.realpath(link))


def _images(tree: Mapping[str, list[str]]) -> list[str]:
    found = (f"{path}/{name}" for path, names in tree.items() for name in names)
    return sorted(path for path in found if path.lower().endswith(EXTENSIONS))
