"""Labels held against the classes of the model, before the first step."""

import datasets
import numpy as np
import pyarrow.compute

from linvit.data.sources.columns import features_of
from linvit.data.sources.read import name_of
from linvit.errors import UserError, did_you_mean, quote_first

SHOWN = 5  # rows that a message names
MAX_CLASSES = 100_000  # without names; from more on a label is taken for a mistake, unless num_classes says the same


def check_labels(rows: datasets.Dataset, image: str, label: str, num_classes: int, split: str, source: str) -> None:
    """Raises a `UserError` unless the label of every row lies in [0, num_classes); its images are not looked at."""
    column = rows.select_columns([label]).with_format("arrow")[:][label]
    known = pyarrow.compute.and_(
        pyarrow.compute.greater_equal(column, 0), pyarrow.compute.less(column, num_classes)
    ).fill_null(False)
    wrong = np.flatnonzero(~known.to_numpy())
    if not len(wrong):
        return
    paths = rows.select_columns([image]).cast_column(image, datasets.Image(decode=False))
    first = ", ".join(
        f"{name_of(paths[row][image], f'row {row}')} has {column[row].as_py()}" for row in wrong[:SHOWN].tolist()
    )
    more = f", and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
    raise UserError(
        f"{len(wrong)} of {len(rows)} labels in the {split} split of '{source}' lie outside the {num_classes} classes, "
        f"0 to {num_classes - 1}: {first}{more}. Repair or remove these rows, or set --data.num_classes"
    )


def label_counts(rows: datasets.Dataset, label: str, num_classes: int) -> str:
    """How many images the classes of a table have, in words."""
    labels = np.array([value for value in rows[label] if value is not None and value >= 0])
    counts = np.bincount(labels.astype(int), minlength=num_classes)
    empty = int((counts == 0).sum())
    return f"{counts.min()} to {counts.max()} of each class" + (f", {empty} classes have none" if empty else "")


def check_label(label: int | None, name: str, num_classes: int | None, source: str) -> int:
    """The label of one image, if it lies in [0, num_classes); without a number it is only to be 0 or more."""
    if label is None or label < 0 or (num_classes is not None and label >= num_classes):
        raise UserError(
            f"the label of '{name}' in '{source}' is {label}, but there are {num_classes} classes: 0 to "
            f"{(num_classes or 0) - 1}. Repair the label, or set --data.num_classes"
        )
    return label


def count_classes(splits: dict[str, datasets.Dataset], label: str, expected: int | None, source: str) -> int:
    """The number of classes: of their names, or one more than the largest label of training.

    A `UserError` says if it is not the one that is expected, or none is and there seem to be more than `MAX_CLASSES`.
    """
    rows = splits.get("train", next(iter(splits.values())))
    feature = features_of(splits)[label]
    names = feature.names if isinstance(feature, datasets.ClassLabel) else None
    found = max(value for value in rows.unique(label) if value is not None) + 1 if names is None else len(names)
    if names is None and expected is None and found > MAX_CLASSES:
        raise UserError(
            f"the largest label of data source '{source}' is {found - 1}. If that is right, and there are {found} "
            f"classes, set --data.num_classes={found}"
        )
    if expected is not None and found != expected:
        classes = "" if names is None else f" ({', '.join(names[:10])}{', ...' if found > 10 else ''})"
        raise UserError(
            f"data source '{source}' has {found} classes{classes}, but num_classes says {expected}. Complete the data, "
            f"or set --data.num_classes={found}, or null to take what it has"
        )
    return int(found)


def check_same_classes(splits: dict[str, datasets.Dataset], label: str, source: str) -> None:
    """Raises a `UserError` if two splits call the same index by different names."""
    named = {
        name: rows.features[label].names
        for name, rows in splits.items()
        if isinstance(rows.features[label], datasets.ClassLabel)
    }
    for (first, names), (second, others) in zip(list(named.items())[:-1], list(named.items())[1:], strict=True):
        if names != others:
            index = next((i for i, pair in enumerate(zip(names, others, strict=False)) if pair[0] != pair[1]), None)
            where = (
                f"{len(names)} against {len(others)} of them"
                if index is None
                else f"class {index} is '{names[index]}' in {first} and '{others[index]}' in {second}"
            )
            raise UserError(f"the splits {first} and {second} of '{source}' have different classes: {where}")


def check_trained_classes(
    splits: dict[str, datasets.Dataset], label: str, classes: list[str], source: str
) -> str | None:
    """What to warn of if a trained class has no validation image: a part of a set may well be meant.

    Raises:
        UserError: If a class of validation or test images has no training image.
    """
    present = {split: set(rows.unique(label)) & set(range(len(classes))) for split, rows in splits.items()}
    trained = present["train"]
    for split in ("val", "test"):
        if untrained := [classes[index] for index in sorted(present.get(split, set()) - trained)]:
            hint = "" if untrained[0].isdecimal() else did_you_mean(untrained[0], [classes[index] for index in trained])
            raise UserError(
                f"the {split} split of '{source}' has classes without training images: {quote_first(untrained)}.{hint} "
                f"Name them as train does, add training images, or move them elsewhere"
            )
    unseen = [classes[index] for index in sorted(trained - present.get("val", trained))]
    return (
        f"the val split of '{source}' has no images of some trained classes: {quote_first(unseen)}" if unseen else None
    )


def check_model_classes(model: int | None, data: int | None, source: str) -> None:
    """Raises a `UserError` if model and data disagree on the number of classes; None is not known."""
    if model is not None and data is not None and model != data:
        raise UserError(
            f"the model has {model} classes, but data source '{source}' has {data}. "
            f"Build the model with num_classes={data}, or choose other data"
        )


def check_stream_labels(
    splits: dict[str, datasets.IterableDataset], label: str, source: str
) -> dict[str, datasets.IterableDataset]:
    """The splits, if their labels are class indices: words can only be numbered by one who has seen them all."""
    kind = getattr(next(iter(splits.values())).features[label], "dtype", "no value")
    if not kind.startswith(("int", "uint")):
        raise UserError(
            f"column '{label}' of data source '{source}' ({kind}) holds no class indices, which streaming needs; "
            f"name another one with --data.label_column, or leave out --data.streaming"
        )
    return splits


def stream_classes(expected: int | None, source: str) -> int:
    """The number of classes of a stream whose labels have no names."""
    if expected is None:
        raise UserError(f"the labels of '{source}' have no names and are not read beforehand; set --data.num_classes")
    return expected
