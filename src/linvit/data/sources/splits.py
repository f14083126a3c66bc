"""Loads the splits of a data source: embedded, on disk, or from the hub, all through the `datasets` library."""

import glob
import math
import os
import re
import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
from lightning.pytorch.utilities import rank_zero_warn

from linvit.data.sources.folder import EXTENSIONS, HIDDEN, PACKED, files_below, holds_images, image_folder
from linvit.data.sources.folder import SPLITS as SPLITS
from linvit.data.sources.labels import features_of, undecoded
from linvit.data.sources.metadata import find_table, read_tables
from linvit.errors import UserError, did_you_mean, quote_first
from linvit.io.reading import read_regular

# `datasets` reports each use to amazonaws.com, even of local files. The hub counts its own downloads.
datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False

Rows = TypeVar("Rows", datasets.Dataset, datasets.IterableDataset)
EMBEDDED = Path(__file__).parents[1] / "assets"
DIGITS = "digits"  # the set that comes with linvit
HUB = "hub:"
SCENES = "digit_scenes"  # made of the embedded digits, with masks
LIKE_SPLIT = re.compile(r"(?:^|[^a-z])(train|val|test|dev)((?:ing|id|idation)?)(?:[^a-z]|$)", re.IGNORECASE)
"""Names that begin or contain a word for a split, such as training_set and val2017."""


def load_splits(source: str, classes: bool = True) -> dict[str, datasets.Dataset]:
    """Returns the splits of a data source, under the names train, val and test as far as they exist.

    It is an embedded set ("digits"); the path of an image folder, a parquet or arrow file, a folder of them, or a set
    saved with `save_to_disk`; or "hub:owner/name". Without `classes`, folders of images do not become classes.
    """
    with readable_source(source):
        kind, place = find_source(source)
        if kind == "saved":
            saved = datasets.load_from_disk(place["path"])
            return named(dict(saved) if isinstance(saved, datasets.DatasetDict) else {"train": saved}, source)
        if kind is not None:
            loaded = named(dict(datasets.load_dataset(kind, **place)), source)
            if "data_dir" in place and source != DIGITS:
                used = datasets.load_dataset_builder(kind, **place).config.data_files or {}
                names = {os.path.realpath(name) for own in used.values() for name in own}
                if left := [
                    str(file) for file in files_of(existing(source), kind) if os.path.realpath(file) not in names
                ]:
                    rank_zero_warn(
                        f"left out of '{source}': {quote_first(left)}, since names of other files in it say splits "
                        f"({', '.join(loaded)}). Rename the files, or move those that are not used away"
                    )
            return loaded
        path = Path(place["path"])
        if not path.is_dir():
            way = ". Unpack it, and give the folder" if path.name.endswith(PACKED) else ""
            way = ". Put it beside its images as metadata.csv" if path.suffix in (".csv", ".tsv", ".jsonl") else way
            way = ". Give its folder" if path.suffix in (".json", ".xml", ".yaml") else way
            raise UserError(f"cannot read '{path}' as data: expected a folder, a .parquet file or an .arrow file{way}")
        splits = image_splits(path, classes)
        images = image_folder(path, splits, classes)
        tables = {split: find_table(splits[split]) for split, rows in images.items() if "label" not in rows.features}
        found = {split: table for split, table in tables.items() if table is not None}
        known = {split: {*files_below(splits[split])} for split in found}
        described = read_tables(found, known)
        for split, rows in described.items():
            named_files = [name for name, kind in rows.features.items() if isinstance(kind, datasets.Image)]
            used = {row[name]["path"] for row in undecoded(rows, *named_files) for name in named_files}
            if more := known[split] - used:
                rank_zero_warn(
                    f"{len(more)} of {len(known[split])} images in '{splits[split]}' are left out: its metadata lacks "
                    f"them, such as '{min(more)}'"
                )
        return images | described


def image_splits(path: Path, classes: bool = True) -> dict[str, Path]:
    """Returns the folder of each split in a folder of images, or itself as train; says which folders are left out.

    Folders named like splits are classes if there are others beside them and they hold images as those do, not
    folders of classes and no table.
    """
    with os.scandir(path) as found:
        entries = sorted((entry for entry in found if not entry.name.startswith(HIDDEN)), key=lambda entry: entry.name)
    loose = [entry.name for entry in entries if entry.name.lower().endswith(EXTENSIONS) and entry.is_file()]
    children = {entry.name: path / entry.name for entry in entries if entry.is_dir() or entry.is_symlink()}
    splits = {name: children[alias[0]] for name, alias in by_alias(children).items()}
    others = [folder for folder in children.values() if folder not in splits.values() and holds_images(folder)]
    if not splits:
        like = {folder: match for folder in others if (match := LIKE_SPLIT.search(folder.name))}
        words = {match[1].lower() for match in like.values()}
        around = {folder.name[: match.start(1)] + folder.name[match.end(2) :] for folder, match in like.items()}
        if classes and "train" in words and len(words) > 1 and (len(around) == 1 or len(like) == len(others)):
            raise UserError(_look_like_splits(path, like))
        inner = {folder: by_alias({each.name for each in folder.iterdir() if each.is_dir()}) for folder in others}
        within = [folder / alias for folder, found in inner.items() for names in found.values() for alias in names]
        if classes and within and len(others) == 1 and not loose:
            names = quote_first([folder.name for folder in within])
            raise UserError(f"the splits of '{path}', {names}, are one level below; give '{others[0]}'")
        if classes and within:
            rank_zero_warn(
                f"'{path}' has no splits: the folders in it are classes, and all images below are of train, including "
                f"{quote_first([str(folder) for folder in within])}. Splits must be above classes: train/CLASS/*.jpg"
            )
        return {"train": path}
    kept = quote_first([folder.name for folder in splits.values()])
    if (others or loose) and not any(_is_split(folder) for folder in splits.values()):
        if classes and others and "train" in splits and all(LIKE_SPLIT.search(folder.name) for folder in others):
            raise UserError(_look_like_splits(path, [*splits.values(), *others]))
        if classes and others:
            rank_zero_warn(
                f"{kept} in '{path}' are classes, like {quote_first([folder.name for folder in others])} beside them, "
                f"not splits: they contain images, not folders of classes. If they are splits, move the others away"
            )
        return {"train": path}
    left = [f"'{folder.name}'" for folder in others] + [f"{len(loose)} images, such as '{loose[0]}'" for _ in loose[:1]]
    if left:
        rank_zero_warn(f"left out of '{path}': {', '.join(left)}, beside its splits, which are {kept}")
    return splits


def _look_like_splits(path: Path, folders: Iterable[Path]) -> str:
    names = quote_first([folder.name for folder in folders])
    return f"the folders {names} in '{path}' look like splits; rename them to train, val and test"


def by_alias(names: Collection[str]) -> dict[str, list[str]]:
    """Returns the names that are aliases of a split, by the name of the split, the most usual one first."""
    found = {
        name: sorted(
            (one for one in names if one.lower() in aliases),
            key=lambda one: (aliases.index(one.lower()), one != one.lower()),
        )
        for name, aliases in SPLITS.items()
    }
    return {name: own for name, own in found.items() if own}


def _is_split(folder: Path) -> bool:
    """True if a folder has folders of images, or a table of its images."""
    if not folder.is_dir():
        return False
    inside = (each for each in folder.iterdir() if each.is_dir() and not each.name.startswith(HIDDEN))
    return find_table(folder) is not None or any(holds_images(each) for each in inside)


def local_folder(source: str) -> Path | None:
    """Returns the path of a data source that is a folder of this machine; None for others."""
    path = Path(source).expanduser()
    return path if source != DIGITS and not source.startswith(HUB) and path.is_dir() else None


def folder_of_images(source: str) -> Path | None:
    """Returns the path of a data source that is a folder of images of this machine; None for tables and others."""
    path = local_folder(source)
    return path if path and source_kind(path) is None else None


def table_features(source: str) -> dict[str, Any]:
    """Returns the columns of a data source stored as tables, with their kinds; empty for all other sources."""
    path = Path(source).expanduser()
    stored = source.startswith(HUB) or (path.exists() and source_kind(path) in ("saved", "parquet", "arrow"))
    return features_of(load_splits(source)) if stored or _described(path) else {}


def _described(path: Path) -> bool:
    """True if a folder, or that of a split in it, has a table of its images."""
    splits = by_alias(os.listdir(path)).values() if path.is_dir() else ()
    return any(map(find_table, [path, *(path / name for names in splits for name in names)]))


def has_labels(source: str) -> bool:
    """True if a data source has columns besides the images, such as the classes of folders."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # which are shown when it is read
        try:
            return any(len(rows.features) > 1 for rows in load_splits(source).values())
        except UserError:
            return False


def find_source(source: str) -> tuple[str | None, dict[str, str]]:
    """Returns the kind of a source ("saved", the builder of `datasets`, or None for images) and its location."""
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
    """Splits under the names train, val and test, whatever they are called; warns of those that are left out."""
    known = {name: aliases[0] for name, aliases in by_alias(found).items()}
    if not known:
        raise UserError(f"data source '{source}' has the splits {', '.join(found)}; expected at least 'train'")
    if left := [name for name in found if name not in known.values()]:
        rank_zero_warn(f"left out of '{source}': the splits {quote_first(left)}; {', '.join(known.values())} are taken")
    return {name: found[alias] for name, alias in known.items()}


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
    """Returns the path that a source names."""
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
    """Returns the kind of local data: saved, parquet, arrow or tar; None for others, such as images in folders."""
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
    """Raises a `UserError` if a file of a kind, or a saved one, is special or malformed."""
    suffix = "arrow" if kind == "saved" else kind
    for file in [path] if path.is_file() else files_of(path, suffix):
        if not file.is_file():
            raise UserError(f"'{file}' is not a regular file; move it away")
        if suffix == "arrow":
            _validate(file)
    for file in path.glob("**/*.json") if kind == "saved" else ():
        quotes = file.name == "dataset_info.json"  # where a set once came from
        if not quotes and b"://" in read_regular(file):
            raise UserError(f"'{file}' names an address; the parts of a saved set are files beside it")


def files_of(path: Path, suffix: str) -> list[Path]:
    """Returns files with a suffix in a folder, and in the folders in it, sorted."""
    return sorted({*path.glob(f"*.{suffix}"), *path.glob(f"*/*.{suffix}")})


def _validate(file: Path) -> None:
    """Raises an error if an offset of an arrow file points outside the file: reading it would leave its memory."""
    with pyarrow.memory_map(str(file)) as stream:
        for batch in arrow_batches(stream):
            batch.validate(full=True)


def arrow_batches(stream: Any) -> Iterator[pyarrow.RecordBatch]:
    """Yields record batches of an arrow file, a stream or a random access file."""
    try:
        return iter(pyarrow.ipc.open_stream(stream))
    except pyarrow.ArrowInvalid:
        reader = pyarrow.ipc.open_file(stream)
        return (reader.get_batch(index) for index in range(reader.num_record_batches))
