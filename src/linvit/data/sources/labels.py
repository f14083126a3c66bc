"""Columns of tables: images, and labels as class indices, compared with the classes before the first step."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow
import pyarrow.compute
from lightning.pytorch.utilities import rank_zero_warn

from linvit.data.sources.read import name_of
from linvit.errors import UserError, did_you_mean, quote_first
from linvit.io.reading import read_text

SHOWN = 5  # rows that a message names
MAX_CLASSES = 100_000  # without names; from more on a label is taken for a mistake, unless num_classes says the same


def features_of(splits: Mapping[str, datasets.Dataset]) -> dict[str, Any]:
    """Returns the columns of all splits and their kinds; if splits differ, the kind of the first one."""
    return {name: kind for rows in [*splits.values()][::-1] for name, kind in rows.features.items()}


def find_column(
    features: Mapping[str, Any], given: str | None, kind: type | tuple[()], names: Sequence[str], source: str
) -> str | None:
    """Returns the given column, else the first with a usual name, else the first of a feature type, else None."""
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


def undecoded(rows: datasets.Dataset, *images: str) -> datasets.Dataset:
    """Returns some columns of images of a table, as their bytes and paths."""
    rows = rows.select_columns([*images])
    for name in images:
        rows = rows.cast_column(name, datasets.Image(decode=False))
    return rows


def as_images(splits: dict[str, datasets.Dataset], image: str, source: str) -> dict[str, datasets.Dataset]:
    """Casts rows whose images are bytes or paths to images; others, and splits without the column, are unchanged."""
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
    """Converts text labels to class indices, in alphabetical order over all splits; keeps indices and gaps."""
    features = [rows.features[label] for rows in splits.values()]
    kinds = {getattr(feature, "dtype", str(feature)) for feature in features} - {"null"}
    words, numbers = kinds <= {"string", "large_string"}, all(kind.startswith(("int", "uint")) for kind in kinds)
    first = splits.get("train", next(iter(splits.values())))  # other splits may have -1 for unpublished labels
    asked = (splits.values() if words else [first]) if words or numbers else []
    values = {value for rows in asked for value in rows.unique(label)} - {None}
    if not values or (numbers and min(values) < 0):
        raise UserError(
            f"column '{label}' of data source '{source}' ({', '.join(sorted(kinds)) or 'null'}) holds no class labels: "
            f"expected words, or whole numbers from 0, and not nulls alone. Name another one with --data.label_column"
        )
    return {name: _numbered(rows, label, sorted(values)) for name, rows in splits.items()} if words else splits


def _numbered(rows: datasets.Dataset, label: str, names: list[str]) -> datasets.Dataset:
    """Returns a table whose labels are indices into `names`. Casting the column would copy all of it, also images."""
    words = rows.select_columns([label]).with_format("arrow")[:][label].cast(pyarrow.string())
    indices = pyarrow.compute.index_in(words, pyarrow.array(names)).cast(pyarrow.int64())
    return rows.remove_columns(label).add_column(label, indices, feature=datasets.ClassLabel(names=names))


def check_labels(rows: datasets.Dataset, image: str, label: str, num_classes: int, split: str, source: str) -> None:
    """Raises a `UserError` unless the label of every row is in [0, num_classes); does not read the images."""
    column = rows.select_columns([label]).with_format("arrow")[:][label]
    labels = pyarrow.compute.fill_null(column.cast(pyarrow.int64()), -1).to_numpy()
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if not len(wrong):
        return
    paths = undecoded(rows, image)
    first = [f"{name_of(paths[row][image], f'row {row}')} has {column[row].as_py()}" for row in wrong[:SHOWN].tolist()]
    first += [f"and {len(wrong) - SHOWN} more"] * (len(wrong) > SHOWN)
    raise UserError(
        f"{len(wrong)} of {len(rows)} labels in the {split} split of '{source}' are outside the {num_classes} classes, "
        f"0 to {num_classes - 1}: {', '.join(first)}. Repair or remove these rows"
    )


def label_counts(rows: datasets.Dataset, label: str, num_classes: int) -> str:
    """Returns a sentence with the number of images of each class of a table."""
    counts = np.bincount([value for value in rows[label] if value is not None and value >= 0], minlength=num_classes)
    empty = int((counts == 0).sum())
    return f"{counts.min()} to {counts.max()} of each class" + (f", {empty} classes have none" if empty else "")


def check_label(
    label: int | None, name: str, num_classes: int | None, source: str, places: Sequence[int] | None = None
) -> int:
    """Returns the label of an image, or its entry in `places`, if it is in [0, num_classes); None is no upper limit."""
    beyond = label is not None and num_classes is not None and label >= num_classes
    if label is None or label < 0 or beyond:
        raise UserError(
            f"the label of '{name}' in '{source}' is {label}, but there are {num_classes} classes: 0 to "
            f"{(num_classes or 0) - 1}. Repair or remove its row" + ", or set --data.num_classes" * beyond
        )
    return label if places is None else places[label]


def count_classes(splits: dict[str, datasets.Dataset], label: str, expected: int | None, source: str) -> int:
    """Returns the number of classes: of their names, or one more than the largest label of training."""
    rows = splits.get("train", next(iter(splits.values())))
    names = getattr(features_of(splits)[label], "names", None)
    found = max(value for value in rows.unique(label) if value is not None) + 1 if names is None else len(names)
    if names is None and expected is None and found > MAX_CLASSES:
        raise UserError(
            f"the largest label of data source '{source}' is {found - 1}. If that is right, and there are {found} "
            f"classes, set --data.num_classes={found}"
        )
    if expected is not None and found != expected:
        raise UserError(
            f"data source '{source}' has {found} classes, but num_classes is {expected}. Complete the data, or set "
            f"--data.num_classes={found}, or null to take the number in the data"
        )
    return int(found)


def check_same_classes(splits: dict[str, datasets.Dataset], label: str, source: str) -> None:
    """Raises a `UserError` if two splits have different names for the same index."""
    kinds = {name: rows.features[label] for name, rows in splits.items()}
    named = {name: kind.names for name, kind in kinds.items() if isinstance(kind, datasets.ClassLabel)}
    for (first, names), (second, others) in pairwise(named.items()):
        if names != others:
            alone = sorted({*names} ^ {*others})
            where = f"one of them lacks {quote_first(alone)}" if alone else "they have another order"
            raise UserError(f"the splits {first} and {second} of '{source}' have different classes: {where}")


def check_trained_classes(splits: dict[str, datasets.Dataset], label: str, classes: list[str], source: str) -> None:
    """Warns of trained classes without a validation image; one without training images is a `UserError`."""
    every = range(len(classes))
    present = {split: {*rows.unique(label)} for split, rows in splits.items()}
    absent = {
        split: [classes[i] for i in every if i in own and i not in present["train"]] for split, own in present.items()
    }
    for split, names in absent.items():
        if names:
            hint = did_you_mean(names[0], [name for name in classes if name not in names and not name.isdecimal()])
            raise UserError(
                f"the {split} split of '{source}' has classes without training images: {quote_first(names)}.{hint} "
                f"Name them as train does, add training images, or move them elsewhere"
            )
    first = min(label for own in present.values() for label in own if label is not None and label >= 0)
    if first and classes[0] == "0":  # numbers without names
        rank_zero_warn(
            f"the least label of '{source}' is {first}, but labels are counted from 0: the network has {len(classes)} "
            f"outputs, and for the first {first} there is no image"
        )
    unseen = [classes[i] for i in every if i in present["train"] and i not in present.get("val", every)]
    if unseen:
        rank_zero_warn(f"the val split of '{source}' has no images of some trained classes: {quote_first(unseen)}")


def places_of(names: Sequence[str], classes: Sequence[str], source: str) -> list[int]:
    """Returns each class's index among a network's classes, found by name or, as in ImageNet-V2, by number."""
    known = {name: index for index, name in enumerate(classes)}
    if known.keys().isdisjoint(names):
        known |= {str(index): index for index in range(len(classes))}
    if unknown := [name for name in names if name not in known]:
        raise UserError(
            f"{len(unknown)} of the {len(names)} classes of '{source}' are not among those of the network: "
            f"{quote_first(unknown)}.{did_you_mean(unknown[0], classes)} The network has {quote_first(classes)}"
        )
    return [known[name] for name in names]


KNOWN = Path(__file__).parents[1] / "class_names"


class Classes(NamedTuple):
    """Classes in the order of their labels: names, and values in the data."""

    names: list[str]
    ids: list[Any]

    @property
    def labels(self) -> dict[Any, int]:
        """The label of each category."""
        return {key: label for label, key in enumerate(self.ids)}


def read_names(given: str) -> list[str]:
    """Returns the names of a known set, or the lines of a file that are not empty."""
    known = KNOWN / f"{given}.txt"
    try:
        lines = read_text(known if known.is_file() else Path(given).expanduser()).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        sets = ", ".join(sorted(file.stem for file in KNOWN.glob("*.txt")))
        raise UserError(
            f"cannot read class_names from '{given}': {error}. Give a list, a file with a name per line, or: {sets}"
        ) from error
    return [line.strip() for line in lines if line.strip()]
