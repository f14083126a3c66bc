"""Loads the splits of a data source: embedded, on disk, or from the hub, all through the `datasets` library."""

import glob
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
from lightning.pytorch.utilities import rank_zero_warn

from linvit.data.sources.folder import image_folder
from linvit.data.sources.labels import MAX_CLASSES, features_of
from linvit.errors import UserError, did_you_mean

Rows = TypeVar("Rows", datasets.Dataset, datasets.IterableDataset)
EMBEDDED = Path(__file__).parents[1] / "assets"
DIGITS = "digits"  # the set that comes with linvit
HUB = "hub:"
SCENES = "digit_scenes"  # made of the embedded digits, with masks
SPLITS = {"train": ("train", "training"), "val": ("validation", "val", "valid", "dev"), "test": ("test", "testing")}


def load_splits(source: str) -> dict[str, datasets.Dataset]:
    """The splits of a data source, under the names train, val and test as far as they exist.

    It is an embedded set ("digits"); the path of an image folder, a parquet or arrow file, a folder of them, or a set
    saved with `save_to_disk`; or "hub:owner/name".
    """
    with readable_source(source):
        kind, place = find_source(source)
        if kind == "saved":
            saved = datasets.load_from_disk(place["path"])
            return named(dict(saved) if isinstance(saved, datasets.DatasetDict) else {"train": saved}, source)
        if kind is not None:
            return named(dict(datasets.load_dataset(kind, **place)), source)
        path = Path(place["path"])
        if not path.is_dir():
            raise UserError(f"cannot read '{path}' as data: expected a folder, a .parquet file or an .arrow file")
        folders = {folder.name: folder for folder in path.iterdir() if folder.is_dir() or folder.is_symlink()}
        aliases = [alias for names in SPLITS.values() for alias in names if alias in folders]
        splits = {alias: folders[alias] for alias in aliases} or {"train": path}
        tables = image_folder(path, splits)
        for split, rows in tables.items():
            if "label" not in rows.features and _is_described(splits[split]):
                tables[split] = _described(splits[split], len(rows))
        return named(tables, source)


def table_features(source: str) -> dict[str, Any]:
    """The columns of a data source that is stored as tables, and their kinds; none of folders and embedded sets."""
    path = Path(source).expanduser()
    stored = source.startswith(HUB) or (path.exists() and source_kind(path) in ("saved", "parquet", "arrow"))
    return features_of(load_splits(source)) if stored else {}


def _is_described(folder: Path) -> bool:
    """Whether a folder of images has a file that names them, beside their labels, as sets of the hub have."""
    for path in (folder / "metadata.csv", folder / "metadata.jsonl"):
        if path.is_file():
            with path.open("rb") as file:
                return b"file_name" in file.readline(2**16)
    return False


def _described(folder: Path, images: int) -> datasets.Dataset:
    """The images that it names, and what it says of them; warns of those that it does not name."""
    files = {"train": f"{glob.escape(str(folder))}/**"}  # as one split, whatever names of files say
    rows = datasets.load_dataset("imagefolder", data_files=files, split="train")
    if len(rows) < images:
        rank_zero_warn(f"{images - len(rows)} of {images} images in '{folder}' are left out: its metadata lacks them")
    return rows


def find_source(source: str) -> tuple[str | None, dict[str, str]]:
    """What a source is: "saved", the builder of `datasets` that loads it, or None for images; and where it lies."""
    if source.startswith(HUB):
        name = source.removeprefix(HUB)
        if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
            raise UserError(f"a set on the hub is called {HUB}owner/name; got '{source}'")
        return name, {}
    path = EMBEDDED / source if source == DIGITS else existing(source)
    kind = source_kind(path)
    if kind is not None:
        check_tables(path, kind)
    if kind in (None, "saved"):
        return kind, {"path": str(path)}
    # brackets in a path are escaped, since they would be a pattern
    place = {"data_dir" if path.is_dir() else "data_files": glob.escape(str(path))}
    return "webdataset" if kind == "tar" else kind, place


def named(found: dict[str, Rows], source: str) -> dict[str, Rows]:
    """Splits under the names train, val and test, whatever they are called."""
    first = {name: next((alias for alias in aliases if alias in found), None) for name, aliases in SPLITS.items()}
    known = {name: found[alias] for name, alias in first.items() if alias is not None}
    if not known:
        raise UserError(f"data source '{source}' has the splits {', '.join(found)}; expected at least 'train'")
    return known


@contextmanager
def readable_source(source: str) -> Iterator[None]:
    """Turns anything that `datasets` and pyarrow raise about unreadable data into a `UserError`."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:  # files of any content
        message = str(error).rstrip(".") or type(error).__name__
        if source.startswith(HUB):
            raise UserError(
                f"cannot get '{source}': {message}. Is the name right, is it public, and can the hub be reached?"
            ) from error
        raise UserError(f"cannot read the data at '{source}': {message}. Is a file incomplete?") from error


def existing(source: str) -> Path:
    """The path that a source names."""
    path = Path(source).expanduser()
    if path.is_dir() or path.is_file():
        return path
    if path.exists():
        raise UserError(f"'{source}' is neither a folder nor a regular file")
    nearest = did_you_mean(source, [DIGITS, SCENES]) if source != SCENES else ""
    raise UserError(
        f"there is no data at '{source}' (looked for {path.absolute()}).{nearest} Give an embedded set "
        f"({DIGITS}; for segmentation {SCENES}), the path of an image folder, parquet or arrow data, or "
        f"{HUB}owner/name"
    )


def source_kind(path: Path) -> str | None:
    """What local data is, by what lies there: saved, parquet, arrow, tar; None for others, as images in folders."""
    if path.is_dir() and any((path / mark).exists() for mark in ("dataset_dict.json", "state.json")):
        return "saved"
    for kind in ("parquet", "arrow", "tar"):
        below = (f"*.{kind}",) if kind == "tar" else (f"*.{kind}", f"*/*.{kind}")  # a full search is slow
        if path.suffix == f".{kind}":
            return kind
        if any(next(path.glob(pattern), None) for pattern in below):
            # beside folders of images, archives are what these were unpacked from
            return None if kind == "tar" and any(file.is_dir() for file in path.iterdir()) else kind
    return None


def hold_out(count: int, fraction: float, source: str) -> dict[str, np.ndarray]:
    """Splits training rows at random, always the same way: `val` gets the fraction, `train` the rest."""
    count_val = math.ceil(fraction * count)
    if count_val >= count:
        raise UserError(
            f"data source '{source}' has no validation split, and holding out a fraction of {fraction} of its {count} "
            f"training images (--data.val_fraction) would leave none to train on; add images, or a validation split"
        )
    order = np.random.default_rng(0).permutation(count)
    return {"train": order[count_val:], "val": order[:count_val]}


def check_tables(path: Path, kind: str) -> None:
    """Raises a `UserError` if a file of a kind, or a saved one, is special, malformed, or claims too much."""
    suffix = "arrow" if kind == "saved" else kind
    for file in [path] if path.is_file() else sorted({*path.glob(f"*.{suffix}"), *path.glob(f"*/*.{suffix}")}):
        if not file.is_file():
            raise UserError(f"'{file}' is not a regular file; move it away")
        if suffix == "parquet":
            metadata = pyarrow.parquet.read_metadata(file)
            if metadata.num_rows > file.stat().st_size:  # of which each has an image
                raise UserError(f"'{file}' claims {metadata.num_rows} rows, more than it has bytes")
            _check_classes(file, (metadata.metadata or {}).get(b"huggingface", b"{}"))
        elif suffix == "arrow":
            _check_classes(file, _validated(file).get(b"huggingface", b"{}"))
    for file in path.glob("**/*.json") if kind == "saved" else ():
        text = file.read_bytes()
        _check_classes(file, text)
        if b"://" in text and file.name != "dataset_info.json":  # which may quote where a set once came from
            raise UserError(f"'{file}' names an address; the parts of a saved set are files beside it")


def _validated(file: Path) -> dict[bytes, bytes]:
    """The metadata of an arrow file whose offsets all lie within it: others would be read outside of its memory."""
    with pyarrow.memory_map(str(file)) as stream:
        try:
            reader = pyarrow.ipc.open_stream(stream)
            batches: Iterator[pyarrow.RecordBatch] = iter(reader)
        except pyarrow.ArrowInvalid:
            reader = pyarrow.ipc.open_file(stream)
            batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
        for batch in batches:
            batch.validate(full=True)
        return reader.schema.metadata or {}


def _check_classes(file: Path, text: bytes) -> None:
    """Raises a `UserError` for a feature of so many unnamed classes that their numbers would fill the memory."""

    def look(entry: dict[str, Any]) -> None:
        classes = entry.get("num_classes")
        if isinstance(classes, int | float) and classes > MAX_CLASSES:
            raise UserError(f"'{file}' claims a column of {classes} classes; at most {MAX_CLASSES} are taken")

    json.loads(text, object_hook=look)
