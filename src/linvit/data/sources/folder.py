"""Folders of images: found quickly, and found again at once.

The `datasets` library takes minutes for a folder of ImageNet's size, since it asks for every file's size and date. The
order of images and their classes are the same; images are files of the formats that are read.
"""

import hashlib
import json
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import datasets
import pyarrow as pa
from lightning.pytorch.utilities import rank_zero_warn
from PIL import Image

from linvit.data.sources.class_folders import FoundClasses, Listing, find_classes
from linvit.data.transforms.decode import FORMATS
from linvit.errors import UserError

Image.init()
EXTENSIONS = tuple(ending for ending, kind in Image.registered_extensions().items() if kind in FORMATS)
TEXT = (".json", ".jsonl", ".csv", ".txt", ".md")
METADATA = {"metadata.csv", "metadata.jsonl", "metadata.parquet"}  # of an imagefolder of `datasets`
SETTLED = 2.0  # seconds; a folder that changed later than this before its scan may change again within one clock tick
THREADS = 16  # folders that are read at once: on a network file system one waits for answers


def image_folder(path: Path, splits: dict[str, Path]) -> dict[str, datasets.Dataset] | None:
    """The images below the folder of each split, with their classes if they have such (`find_classes`), as tables.

    They are kept in the cache of `datasets`, under the name of `path`, as long as no folder's date changes: adding,
    removing and renaming files changes it. Where something may be wrong nothing is kept: each start warns of it, and
    sees when it is repaired. None if the folder holds metadata files or archives, which are for `datasets` to read.
    """
    cache = cache_folder("folders", str(path.absolute()))
    found = cached(cache, splits)
    if found is not None:
        return found
    started = time.time()
    listings = {name: _walk(str(folder.absolute())) for name, folder in splits.items()}
    everything = [listing for tree in listings.values() for listing in tree.values()]
    if any(listing.others for listing in everything):
        return None
    files = {name: paths for name, tree in listings.items() if (paths := _files(tree))}
    if not files:
        raise UserError(
            f"there are no images in '{path}'; expected one folder of images per class, under train/ and val/, or "
            f"images with masks in train/images and train/masks, val/images and val/masks"
        )
    classes = find_classes(listings, str(path))
    tables = _tables(files, classes)
    for warning in classes.warnings:
        rank_zero_warn(warning)
    newest = max(listing.changed for listing in everything) / 1e9
    if started - newest > SETTLED and not classes.warnings:
        dates = {name: {folder: listing.changed for folder, listing in tree.items()} for name, tree in listings.items()}
        return keep(cache, dates, tables)
    return tables


def files_below(folder: Path) -> list[str]:
    """Paths of all images below a folder, sorted."""
    return _files(_walk(str(folder.absolute())))


def ignored_files(folder: Path) -> list[str]:
    """Paths of all files below a folder that nobody reads, such as HEIC images, sorted."""
    tree = _walk(str(folder.absolute()))
    return sorted(f"{path}/{name}" for path, listing in tree.items() for name in listing.ignored)


def path_column(paths: list[str]) -> pa.StructArray:
    """Paths as the `datasets` library stores images."""
    try:
        return pa.StructArray.from_arrays([pa.nulls(len(paths), pa.binary()), pa.array(paths)], ["bytes", "path"])
    except UnicodeEncodeError as error:
        raise UserError(
            f"the name of the file {error.object!r} is not UTF-8, which tables of paths need; rename it"
        ) from error


def _walk(root: str) -> dict[str, Listing]:
    """Every folder below `root`, itself included, that is neither hidden nor special; links are followed."""
    tree: dict[str, Listing] = {}
    level = [root]
    with ThreadPoolExecutor(THREADS) as pool:
        while level:
            tree |= zip(level, pool.map(_list, level), strict=True)
            level = [f"{folder}/{name}" for folder in level for name in tree[folder].folders]
    return tree


def _list(folder: str) -> Listing:
    images, ignored, folders, broken, others = [], [], [], [], False
    try:
        changed = os.stat(folder).st_mtime_ns  # before reading: a change while reading makes the listing old
        with os.scandir(folder) as entries:
            for entry in entries:
                name = entry.name
                if name.startswith("."):
                    continue
                if entry.is_dir():
                    if not name.startswith("__") and not (entry.is_symlink() and _leads_up(entry.path)):
                        folders.append(name)
                elif name.lower().endswith(EXTENSIONS):
                    images.append(name)
                elif (name in METADATA or name.lower().endswith(".zip")) and entry.is_file():
                    others = True
                elif entry.is_symlink() and not os.path.exists(entry.path):
                    broken.append(name)
                elif not name.lower().endswith(TEXT):
                    ignored.append(name)
    except OSError as error:
        raise UserError(
            f"cannot read the folder '{folder}': {error.strerror}. Its images would be missing without a word; "
            f"make it readable (chmod -R a+rX), or move it away"
        ) from error
    return Listing(images, ignored, folders, broken, others, changed)


def _leads_up(link: str) -> bool:
    """Whether a link leads to a folder that it lies in: following it would never end."""
    return f"{os.path.realpath(os.path.dirname(link))}/".startswith(f"{os.path.realpath(link)}/")


def _files(tree: dict[str, Listing]) -> list[str]:
    """Paths of all images, sorted."""
    return sorted(f"{folder}/{name}" for folder, listing in tree.items() for name in listing.images)


def _tables(files: dict[str, list[str]], classes: FoundClasses) -> dict[str, datasets.Dataset]:
    """The files of each split as a table, with labels if the folders that they lie in are classes."""
    number = {name: index for index, name in enumerate(classes.names)}
    tables = {}
    for name, paths in files.items():
        columns: list[pa.Array] = [path_column(paths)]
        features = datasets.Features({"image": datasets.Image()})
        if name in classes.splits:
            features["label"] = datasets.ClassLabel(names=classes.names)
            columns.append(pa.array([number[path.rsplit("/", 2)[1]] for path in paths], pa.int64()))
        tables[name] = datasets.Dataset(pa.Table.from_arrays(columns, schema=features.arrow_schema))
    return tables


def cache_folder(kind: str, key: str) -> Path:
    """Where the tables of some data are kept: beside those of `datasets`."""
    name = hashlib.sha256(os.fsencode(key)).hexdigest()[:32]
    return Path(datasets.config.HF_DATASETS_CACHE) / "linvit" / kind / name


def cached(cache: Path, splits: Mapping[str, object]) -> dict[str, datasets.Dataset] | None:
    """The tables of an earlier scan if every folder still has the date that it had then."""
    try:
        index = json.loads((cache / "index.json").read_text(encoding="utf-8"))
        if index["folders"].keys() != splits.keys():
            return None
        for dates in index["folders"].values():
            if any(os.stat(folder).st_mtime_ns != changed for folder, changed in dates.items()):
                return None
        return {name: datasets.Dataset.from_file(str(cache / file)) for name, file in index["tables"].items()}
    except (OSError, ValueError, KeyError):
        return None  # there is none, or it is incomplete, or a folder is gone


def keep(
    cache: Path, dates: dict[str, dict[str, int]], tables: dict[str, datasets.Dataset]
) -> dict[str, datasets.Dataset]:
    """Writes tables into the cache, and returns them as memory-mapped from there.

    Files are renamed into place and carry the dates in their names, so that processes that scan at the same time write
    the same; the index comes last.
    """
    version = hashlib.sha256(json.dumps(dates, sort_keys=True).encode()).hexdigest()[:16]
    try:
        cache.mkdir(parents=True, exist_ok=True)
        names = {name: f"{version}-{name}.arrow" for name in tables}
        for name, table in tables.items():
            part = cache / f"{names[name]}.{os.getpid()}"
            schema = table.features.arrow_schema  # with the kinds of columns as metadata
            with pa.ipc.new_stream(part, schema) as writer:
                writer.write_table(table.with_format("arrow")[:].cast(schema))
            part.replace(cache / names[name])
        part = cache / f"index.json.{os.getpid()}"
        part.write_text(json.dumps({"folders": dates, "tables": names}), encoding="utf-8")
        part.replace(cache / "index.json")
        for old in cache.glob("*.arrow"):
            if old.name not in names.values():
                old.unlink(missing_ok=True)
        return {name: datasets.Dataset.from_file(str(cache / file)) for name, file in names.items()}
    except OSError:
        return tables  # a full or read-only cache costs a scan at the next start, no more
