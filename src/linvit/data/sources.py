"""Where images come from: embedded, on disk, or the hub, all through the `datasets` library."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import datasets
import pyarrow

from linvit.data.folder import image_folder
from linvit.errors import UserError, did_you_mean

Rows = TypeVar("Rows", datasets.Dataset, datasets.IterableDataset)
EMBEDDED = Path(__file__).parent / "assets"
HUB = "hub:"
SPLITS = {"train": ("train", "training"), "val": ("validation", "val", "valid", "dev"), "test": ("test", "testing")}


def load_splits(source: str) -> dict[str, datasets.Dataset]:
    """The splits of a data source, under the names train, val and test as far as they exist.

    Args:
        source: The name of an embedded set ("digits"); the path of an image folder, a parquet or arrow file, a folder
            of them, or a set saved with `save_to_disk`; or "hub:owner/name".

    Raises:
        UserError: If nothing is there, or nothing in it can be read as images.
    """
    return named(_load(source), source)


def named(found: dict[str, Rows], source: str) -> dict[str, Rows]:
    """Splits under the names train, val and test, whatever they are called.

    Raises:
        UserError: If none has a known name.
    """
    known = {}
    for name, aliases in SPLITS.items():
        present = [alias for alias in aliases if alias in found]
        if present:
            known[name] = found[present[0]]
    if not known:
        raise UserError(f"data source '{source}' has the splits {', '.join(found)}; expected at least 'train'")
    return known


def embedded() -> list[str]:
    """Names of the data sets that come with linvit."""
    return sorted(folder.name for folder in EMBEDDED.iterdir() if folder.is_dir())


def _load(source: str) -> dict[str, datasets.Dataset]:
    if source.startswith(HUB):
        return dict(datasets.load_dataset(source.removeprefix(HUB)))
    if source in embedded():
        return dict(datasets.load_dataset("parquet", data_dir=str(EMBEDDED / source)))
    path = existing(source)
    try:
        return _load_path(path)
    except (pyarrow.ArrowInvalid, datasets.exceptions.DatasetGenerationError) as error:
        raise UserError(f"cannot read the data at '{path}': {error}. Is a file incomplete?") from error


def existing(source: str) -> Path:
    """The path that a source names.

    Raises:
        UserError: If nothing is there.
    """
    path = Path(source).expanduser()
    if not path.exists():
        raise UserError(
            f"there is no data at '{source}' (looked for {path.absolute()}).{did_you_mean(source, embedded())} "
            f"Give an embedded set ({', '.join(embedded())}), the path of an image folder, parquet or arrow data, or "
            f"{HUB}owner/name"
        )
    return path


def kind_of(path: Path) -> Literal["saved", "parquet", "arrow", "tar"] | None:
    """What local data is, by what lies there; None for anything else, such as images in folders."""
    if path.is_dir() and any((path / mark).exists() for mark in ("dataset_dict.json", "state.json")):
        return "saved"
    kinds: tuple[Literal["parquet", "arrow", "tar"], ...] = ("parquet", "arrow", "tar")
    for kind in kinds:
        below = (f"*.{kind}",) if kind == "tar" else (f"*.{kind}", f"*/*.{kind}")  # a full search is slow
        if path.suffix == f".{kind}":
            return kind
        if any(next(path.glob(pattern), None) for pattern in below):
            # beside folders of images, archives are what these were unpacked from
            return None if kind == "tar" and any(file.is_dir() for file in path.iterdir()) else kind
    return None


def _load_path(path: Path) -> dict[str, datasets.Dataset]:
    """Local data: what it is follows from what lies there."""
    kind = kind_of(path)
    if kind == "saved":
        saved = datasets.load_from_disk(str(path))
        return dict(saved) if isinstance(saved, datasets.DatasetDict) else {"train": saved}
    if kind is not None:
        where = {"data_dir": str(path)} if path.is_dir() else {"data_files": str(path)}
        return dict(datasets.load_dataset("webdataset" if kind == "tar" else kind, **where))
    if not path.is_dir():
        raise UserError(f"cannot read '{path}' as data: expected a folder, a .parquet file or an .arrow file")
    # The outermost folder names the split; left to itself, imagefolder takes a class called "test tube" for one.
    folders = {folder.name: folder for folder in path.iterdir() if folder.is_dir()}
    aliases = [alias for names in SPLITS.values() for alias in names if alias in folders]
    splits = {alias: folders[alias] for alias in aliases} or {"train": path}
    found = image_folder(path, splits)
    if found is None:
        files = {name: [f"{folder}/**"] for name, folder in splits.items()}
        return dict(datasets.load_dataset("imagefolder", data_files=files))
    return found


def column(rows: datasets.Dataset, given: str | None, kind: type, names: Sequence[str], source: str) -> str | None:
    """The given column, else the first with a usual name, else the first of a feature type, else None.

    Raises:
        UserError: If the given column does not exist.
    """
    features: dict[str, Any] = dict(rows.features)
    if given is not None:
        if given not in features:
            raise UserError(
                f"data source '{source}' has no column '{given}'.{did_you_mean(given, features)} "
                f"It has: {', '.join(features)}"
            )
        return given
    usual = [name for name in names if name in features]
    typed = [name for name, feature in features.items() if isinstance(feature, kind)]
    return next(iter(usual + typed), None)


def as_images(splits: dict[str, datasets.Dataset], image: str, source: str) -> dict[str, datasets.Dataset]:
    """Rows whose images are bytes or paths, as images; others stay.

    Raises:
        UserError: If the column cannot hold images.
    """
    if isinstance(next(iter(splits.values())).features[image], datasets.Image):
        return splits
    try:
        return {name: rows.cast_column(image, datasets.Image()) for name, rows in splits.items()}
    except (TypeError, ValueError, pyarrow.ArrowException) as error:
        raise UserError(f"column '{image}' of data source '{source}' holds no images: {error}") from error


def as_indices(splits: dict[str, datasets.Dataset], label: str, source: str) -> dict[str, datasets.Dataset]:
    """Labels that are words become class indices, in alphabetical order over all splits; indices stay.

    Raises:
        UserError: If the labels are neither words nor whole numbers from 0.
    """
    feature = next(iter(splits.values())).features[label]
    kind = getattr(feature, "dtype", str(feature))
    if kind == "string":
        names = sorted({word for rows in splits.values() for word in rows.unique(label)})
        return {name: rows.cast_column(label, datasets.ClassLabel(names=names)) for name, rows in splits.items()}
    rows = splits.get("train", next(iter(splits.values())))
    if (
        not kind.startswith(("int", "uint"))
        or min((value for value in rows.unique(label) if value is not None), default=0) < 0
    ):
        raise UserError(
            f"column '{label}' of data source '{source}' ({kind}) holds no class labels: expected words, "
            f"or whole numbers from 0. Name another one with --data.label_column"
        )
    return splits
