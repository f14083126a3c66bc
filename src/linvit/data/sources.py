"""Where images come from: embedded, on disk, or the hub, all through the `datasets` library."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets

from linvit.errors import UserError, did_you_mean

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
    found = _load(source)
    named = {}
    for name, aliases in SPLITS.items():
        present = [alias for alias in aliases if alias in found]
        if present:
            named[name] = found[present[0]]
    if not named:
        raise UserError(f"data source '{source}' has the splits {', '.join(found)}; expected at least 'train'")
    return named


def embedded() -> list[str]:
    """Names of the data sets that come with linvit."""
    return sorted(folder.name for folder in EMBEDDED.iterdir() if folder.is_dir())


def _load(source: str) -> dict[str, datasets.Dataset]:
    if source.startswith(HUB):
        return dict(datasets.load_dataset(source.removeprefix(HUB)))
    if source in embedded():
        return dict(datasets.load_dataset("parquet", data_dir=str(EMBEDDED / source)))
    path = Path(source).expanduser()
    if not path.exists():
        raise UserError(
            f"there is no data at '{source}' (looked for {path.absolute()}).{did_you_mean(source, embedded())} "
            f"Give an embedded set ({', '.join(embedded())}), the path of an image folder, parquet or arrow data, or "
            f"{HUB}owner/name"
        )
    return _load_path(path)


def _load_path(path: Path) -> dict[str, datasets.Dataset]:
    """Local data: what it is follows from what lies there."""
    if path.is_dir() and any((path / mark).exists() for mark in ("dataset_dict.json", "state.json")):
        saved = datasets.load_from_disk(str(path))
        return dict(saved) if isinstance(saved, datasets.DatasetDict) else {"train": saved}
    for kind in ("parquet", "arrow"):
        if path.suffix == f".{kind}":
            return dict(datasets.load_dataset(kind, data_files=str(path)))
        if any(next(path.glob(pattern), None) for pattern in (f"*.{kind}", f"*/*.{kind}")):  # a full search is slow
            return dict(datasets.load_dataset(kind, data_dir=str(path)))
    if not path.is_dir():
        raise UserError(f"cannot read '{path}' as data: expected a folder, a .parquet file or an .arrow file")
    if not any(file.is_file() and not file.name.startswith(".") for file in path.rglob("*")):
        raise UserError(
            f"the data folder '{path}' is empty; expected one folder of images per class, under train/ and val/"
        )
    try:
        return dict(datasets.load_dataset("imagefolder", data_dir=str(path)))
    except datasets.exceptions.DataFilesNotFoundError as error:
        raise UserError(
            f"there are no images in '{path}'; expected one folder of images per class, under train/ and val/"
        ) from error


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


def encode_labels(splits: dict[str, datasets.Dataset], label: str) -> dict[str, datasets.Dataset]:
    """Labels that are words become class indices, in alphabetical order over all splits; others stay."""
    if next(iter(splits.values())).features[label].dtype != "string":
        return splits
    names = sorted({word for rows in splits.values() for word in rows.unique(label)})
    return {name: rows.cast_column(label, datasets.ClassLabel(names=names)) for name, rows in splits.items()}
