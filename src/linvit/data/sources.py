"""Where images come from: embedded, on disk, or the hub, all through the `datasets` library."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow
from PIL import Image

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
    try:
        return _load_path(path)
    except (pyarrow.ArrowInvalid, datasets.exceptions.DatasetGenerationError) as error:
        raise UserError(f"cannot read the data at '{path}': {error}. Is a file incomplete?") from error


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
    extensions = Image.registered_extensions()
    if not any(file.suffix.lower() in extensions for file in path.rglob("*")):
        raise UserError(
            f"there are no images in '{path}'; expected one folder of images per class, under train/ and val/"
        )
    # The outermost folder names the split; left to itself, imagefolder takes a class called "test tube" for one.
    folders = {folder.name: [f"{folder}/**"] for folder in path.iterdir() if folder.is_dir()}
    splits = {name: files for name, files in folders.items() if any(name in aliases for aliases in SPLITS.values())}
    return dict(datasets.load_dataset("imagefolder", data_files=splits or {"train": [f"{path}/**"]}))


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
    if not kind.startswith(("int", "uint")) or min(rows.unique(label)) < 0:
        raise UserError(
            f"column '{label}' of data source '{source}' ({kind}) holds no class labels: expected words, "
            f"or whole numbers from 0. Name another one with --data.label_column"
        )
    return splits
