"""What the columns of a table hold: images, and labels as class indices."""

from collections.abc import Mapping, Sequence
from typing import Any

import datasets
import pyarrow
import pyarrow.compute

from linvit.errors import UserError, did_you_mean


def features_of(splits: Mapping[str, datasets.Dataset]) -> dict[str, Any]:
    """The columns that any split has, and their kinds; where splits differ, the first one says."""
    return {name: kind for rows in [*splits.values()][::-1] for name, kind in rows.features.items()}


def find_column(
    features: Mapping[str, Any], given: str | None, kind: type | tuple[()], names: Sequence[str], source: str
) -> str | None:
    """The given column, else the first with a usual name, else the first of a feature type, else None."""
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
    """Rows whose images are bytes or paths, as images; others stay, and splits without the column."""
    plain = {
        name: rows
        for name, rows in splits.items()
        if image in rows.features and not isinstance(rows.features[image], datasets.Image)
    }
    try:
        return splits | {name: rows.cast_column(image, datasets.Image()) for name, rows in plain.items()}
    except (TypeError, ValueError, pyarrow.ArrowException) as error:
        raise UserError(f"column '{image}' of data source '{source}' holds no images: {error}") from error


def as_indices(splits: dict[str, datasets.Dataset], label: str, source: str) -> dict[str, datasets.Dataset]:
    """Labels that are words become class indices, in alphabetical order over all splits; indices stay, and gaps."""
    features = [rows.features[label] for rows in splits.values()]
    kinds = {getattr(feature, "dtype", str(feature)) for feature in features} - {"null"}
    words, numbers = kinds <= {"string", "large_string"}, all(kind.startswith(("int", "uint")) for kind in kinds)
    first = splits.get("train", next(iter(splits.values())))  # others may have -1 for what is not published
    asked = (splits.values() if words else [first]) if words or numbers else []
    values = {value for rows in asked for value in rows.unique(label)} - {None}
    if not values or (numbers and min(values) < 0):
        raise UserError(
            f"column '{label}' of data source '{source}' ({', '.join(sorted(kinds)) or 'null'}) holds no class labels: "
            f"expected words, or whole numbers from 0, and not nulls alone. Name another one with --data.label_column"
        )
    return {name: _numbered(rows, label, sorted(values)) for name, rows in splits.items()} if words else splits


def _numbered(rows: datasets.Dataset, label: str, names: list[str]) -> datasets.Dataset:
    """A table whose labels are places in `names`. A cast of the column would write all of it again, images too."""
    words = rows.select_columns([label]).with_format("arrow")[:][label].cast(pyarrow.string())
    indices = pyarrow.compute.index_in(words, pyarrow.array(names)).cast(pyarrow.int64())
    return rows.remove_columns(label).add_column(label, indices, feature=datasets.ClassLabel(names=names))
