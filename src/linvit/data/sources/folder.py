"""Folders of images, and the folders that are classes.

The `datasets` library takes minutes for a folder of ImageNet's size, since it asks for every file's size and date. The
order of images and their classes are the same; images are files of the formats that are read.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_warn
from PIL import Image

from linvit.data.sources.metadata import find_table
from linvit.data.transforms.decode import FORMATS
from linvit.errors import UserError, quote_first
from linvit.io.reading import read_start

if TYPE_CHECKING:  # linvit predict lists files without them
    import datasets
    import pyarrow as pa

Image.init()
EXTENSIONS = tuple(ending for ending, kind in Image.registered_extensions().items() if kind in FORMATS)
SPLITS = {"train": ("train", "training"), "val": ("validation", "val", "valid", "dev"), "test": ("test", "testing")}
ALIASES = {alias for aliases in SPLITS.values() for alias in aliases}
TEXT = (".json", ".jsonl", ".csv", ".tsv", ".txt", ".md")
PACKED = (".zip", ".tar", ".tar.gz", ".tgz", ".7z", ".rar")
HIDDEN = (".", "__")
NAMED = re.compile("id$|image|img|file|name|path", re.IGNORECASE)  # in titles of columns that name images
NAMED_ROWS = 20  # of a table that are looked at
JUNK = {".ipynb_checkpoints", "__MACOSX", "__pycache__"}  # folders that tools create, never classes


def image_folder(path: Path, splits: Mapping[str, Path], classes: bool = True) -> dict[str, "datasets.Dataset"]:
    """Returns the images below each split's folder as tables, with classes: the first folders below that folder.

    A single folder is not a class. Images beside the class folders are left out, with a warning; without `classes`,
    or without class folders in a split, all of its images are taken.
    """
    import datasets
    import pyarrow as pa

    trees = {split: walk(folder) for split, folder in splits.items()}
    files = {split: paths for split, tree in trees.items() if (paths := _images(tree))}
    if not files:
        packed = [name for tree in trees.values() for own in tree.values() for name in own if name.endswith(PACKED)]
        unpack = f". Unpack {quote_first(sorted(packed))}" if packed else ""
        raise UserError(
            f"there are no images in '{path}'; expected one folder of images per class, under train/ and val/, or "
            f"images with masks in train/images and train/masks, val/images and val/masks{unpack}"
        )
    inner = {split: _first_folders(splits[split], paths) if classes else [] for split, paths in files.items()}
    for split, own in inner.items():
        if "" in own and find_table(splits[split]) is not None:
            inner[split] = []  # the table lists the images and their labels
    names = sorted({name for own in inner.values() for name in own} - {""})
    number = {name: index for index, name in enumerate(names)}
    kind, tables = datasets.ClassLabel(names=names), {}
    for split in [split for split, own in inner.items() if any(own)][: len(names) == 1]:
        below = folders_in(trees[split], f"{next(iter(trees[split]))}/{names[0]}")
        move = f"; if its folders {quote_first(below)} are the classes, move them into '{splits[split]}'"
        rank_zero_warn(
            f"the images of '{path}' have no classes, but a classifier needs two: the only class folder is "
            f"'{splits[split] / names[0]}'" + move * (len(below) > 1)
        )
    for split, paths in files.items():
        if len(names) < 2 or not any(inner[split]):
            tables[split] = path_table({"image": paths})
            continue
        rows = [(file, number[name]) for file, name in zip(paths, inner[split], strict=True) if name]
        labels = pa.array([label for _, label in rows], pa.int64())
        tables[split] = path_table({"image": [file for file, _ in rows]}, {"label": (kind, labels)})
        loose = [file for file, name in zip(paths, inner[split], strict=True) if not name]
        _tell_left_out(splits[split], trees[split], {*inner[split]}, loose)
    return tables


def _first_folders(folder: Path, files: Sequence[str]) -> list[str]:
    """Returns the first path component of each file below `folder`; empty for files directly in it."""
    start = len(folder.absolute().as_posix().rstrip("/")) + 1
    return [file[start:].partition("/")[0] if "/" in file[start:] else "" for file in files]


def _tell_left_out(folder: Path, tree: Mapping[str, list[str]], classes: Set[str], loose: Sequence[str]) -> None:
    """Warns of empty folders and of files in a split's folder that belong to no class."""
    root = next(iter(tree))
    if empty := [f"{root}/{name}" for name in folders_in(tree, root) if name not in classes]:
        rank_zero_warn(f"no images in {quote_first(empty)}: fill or remove these folders")
    others = _unread(tree)
    hidden = [
        each.name
        for each in sorted(folder.iterdir())
        if each.is_dir() and each.name.startswith(HIDDEN) and each.name not in JUNK and holds_images(each)
    ]
    table = find_table(folder)
    left = [
        *[f"{len(loose)} images beside the class folders, such as '{loose[0]}'" for _ in loose[:1]],
        *[f"{len(others)} files of kinds that are not read, such as '{others[0]}'" for _ in others[:1]],
        *[f"the hidden folders {quote_first(hidden)}" for _ in hidden[:1]],
        *[f"'{table.name}', since the folders are the classes" for _ in [table] if table is not None],
    ]
    if left:
        rank_zero_warn(f"left out of '{folder}': {'; '.join(left)}")


def folders_in(tree: Mapping[str, list[str]], folder: str) -> list[str]:
    """Names of the folders in a folder of a tree, sorted."""
    return sorted(name for path in tree for parent, _, name in [path.rpartition("/")] if parent == folder)


def holds_images(folder: Path) -> bool:
    """True if a file below a folder is an image."""
    return any(name.lower().endswith(EXTENSIONS) for _, names in _visit(folder, None) for name in names)


def in_folders(folder: Path) -> bool:
    """True if a folder has images in folders, other than those for validation and test."""
    others = (*SPLITS["val"], *SPLITS["test"])
    return any(
        inside.rpartition("/")[2].lower() not in others and any(name.lower().endswith(EXTENSIONS) for name in names)
        for inside, names in [*walk(folder).items()][1:]
    )


def naming_tables(folder: Path) -> list[str]:
    """Returns paths of tables below a folder with a column of image names, except those that are read."""
    tree = walk(folder)
    tables = [f"{path}/{name}" for path, own in tree.items() for name in own if name.lower().endswith((".csv", ".tsv"))]
    tables = [table for table in sorted(tables) if Path(table) != find_table(Path(table).parent)]
    files = {os.path.basename(path) for path in _images(tree)} if tables else set()
    known = files | {name.rpartition(".")[0] for name in files}
    return [table for table in tables if _names_images(table, known, min(NAMED_ROWS, (len(files) + 1) // 2))]


def _names_images(table: str, known: Set[str], least: int) -> bool:
    """True if a column of the first rows, at least so many, has names of images; numbers are some if its title says so.

    Fewer rows are those of classes, or of epochs.
    """
    try:
        lines = read_start(table, 2**16).decode(errors="replace").splitlines()[: NAMED_ROWS + 1]
    except OSError:
        return False
    rows = [[os.path.basename(cell.strip(" '\"")) for cell in re.split("[,;\t]", line)] for line in lines]
    columns = [*zip(*rows, strict=False)] if len(rows) > least else []
    return any(
        {*cells} <= known and (NAMED.search(title) or not "".join(cells).isdecimal()) for title, *cells in columns
    )


def files_below(folder: Path) -> list[str]:
    """Returns paths of all images below a folder, sorted."""
    return _images(walk(folder))


def image_names(folder: str) -> list[str]:
    """Names of the images in a folder, not below, that are not hidden; sorted."""
    names = (name for name in os.listdir(folder) if not name.startswith("."))
    return sorted(name for name in names if name.lower().endswith(EXTENSIONS))


def ignored_files(folder: Path) -> list[str]:
    """Returns the sorted paths of all files below a folder that linvit does not read, such as HEIC images."""
    return _unread(walk(folder))


def path_table(
    images: Mapping[str, Sequence[str]], others: Mapping[str, tuple[Any, "pa.Array"]] | None = None
) -> "datasets.Dataset":
    """Returns a table of columns of images by their paths, and of others by their kind and values."""
    import datasets
    import pyarrow as pa

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
    """Returns the files of a folder and of all folders below it, except hidden and special ones; follows links.

    Paths have slashes, also under Windows.
    """

    def refuse(error: OSError) -> None:
        raise UserError(
            f"cannot read the folder '{error.filename}': {error.strerror}. Its images would be missing without a word; "
            f"make it readable (chmod -R a+rX), or move it away"
        ) from error

    return {Path(path).as_posix(): files for path, files in _visit(folder, refuse)}


def _visit(folder: Path, on_error: Callable[[OSError], None] | None) -> Iterator[tuple[str, list[str]]]:
    """Yields each folder below one that is not hidden, itself first, and its files."""
    for path, folders, files in os.walk(folder.absolute(), onerror=on_error, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(HIDDEN) and not _leads_up(f"{path}/{name}")]
        yield path, [name for name in files if not name.startswith(".")]


def _leads_up(link: str) -> bool:
    """True if a link leads to one of its parent folders: following it would never end."""
    return os.path.islink(link) and Path(os.path.realpath(os.path.dirname(link))).is_relative_to(os.path.realpath(link))


def _unread(tree: Mapping[str, list[str]]) -> list[str]:
    read = (*EXTENSIONS, *TEXT)
    found = (f"{path}/{name}" for path, names in tree.items() for name in names if not name.lower().endswith(read))
    return sorted(found)


def _images(tree: Mapping[str, list[str]]) -> list[str]:
    found = (f"{path}/{name}" for path, names in tree.items() for name in names)
    return sorted(path for path in found if path.lower().endswith(EXTENSIONS))
