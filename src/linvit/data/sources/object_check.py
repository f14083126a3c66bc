"""Looks at all objects of a split before the first step: boxes, categories, classes without objects."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from linvit.data.sources.objects import FlatObjects
from linvit.data.transforms.detection import areas, trainable
from linvit.errors import UserError, some

SHOWN = 3  # objects that a message names
WRONG_FORMAT = 0.3  # fraction of boxes that reach out of their images, from which on they are taken for another format
SLACK = 1.0  # pixels by which a box may


class Finding(NamedTuple):
    """Something about one object.

    Attributes:
        row: Number of its image in the table.
        id: Of the annotation, as the data say.
        reason: What it is.
        wrong: Whether it must be mended; otherwise it is left out of training.
    """

    row: int
    id: Any
    reason: str
    wrong: bool


class Look(NamedTuple):
    """What there is to say about the objects of a split.

    Attributes:
        flat: The objects.
        counts: How many each class has, int (K,).
        findings: Objects that are wrong, or kept from being trained on though the data do not say so.
        wrong_format: What to say if the boxes seem to be stored in another format.
    """

    flat: FlatObjects
    counts: np.ndarray
    findings: list[Finding]
    wrong_format: str | None


def look_at(flat: FlatObjects, sizes: np.ndarray, labels: Mapping[Any, int], subset: bool, box_format: str) -> Look:
    """Looks at all objects of a split.

    Args:
        flat: The objects.
        sizes: (H, W) of each image, int (rows, 2), 0 of an image that cannot be read.
        labels: Label of each category.
        subset: Whether objects of other categories are left out on purpose.
        box_format: How the data store boxes: xywh or xyxy.
    """
    used = [labels[category] for category in flat.categories.tolist() if category in labels]
    counts = np.bincount(used, minlength=len(labels))
    return Look(flat, counts, _findings(flat, sizes, labels, subset), _wrong_format(flat, sizes, box_format))


def _findings(flat: FlatObjects, sizes: np.ndarray, labels: Mapping[Any, int], subset: bool) -> list[Finding]:
    objects = flat.objects
    x1, y1, x2, y2 = objects["boxes"].T
    finite = np.isfinite(objects["boxes"]).all(1) & np.isfinite(areas(objects))
    unknown = np.array([not subset and category not in labels for category in flat.categories.tolist()], bool)
    height, width = _sizes(flat, sizes)
    outside = (np.minimum(x2, width) <= np.maximum(x1, 0)) | (np.minimum(y2, height) <= np.maximum(y1, 0))
    meant = np.logical_or.reduce([~finite, *(objects[flag] for flag in ("iscrowd", "ignore") if flag in objects)])
    thin = (x2 - x1 < 1) | (y2 - y1 < 1)
    findings = []
    for which, reason, wrong in (
        (~finite, "its box or its area is no finite number", True),
        (unknown, "its category is none of the classes", True),
        (thin & ~meant, "its box has a side of less than a pixel", False),
        (outside & ~thin & ~meant, "its box lies outside of the image", False),
        ((areas(objects) <= 0) & ~thin & ~outside & ~meant, "its area is 0", False),
    ):
        for index in np.flatnonzero(which).tolist():
            shown = f" ({flat.categories[index]})" if which is unknown else f" {objects['boxes'][index].tolist()}"
            findings.append(Finding(int(flat.rows[index]), flat.ids[index], reason + shown, wrong))
    return findings


def _wrong_format(flat: FlatObjects, sizes: np.ndarray, box_format: str) -> str | None:
    boxes = flat.objects["boxes"]
    if not len(boxes):
        return None
    height, width = _sizes(flat, sizes)
    other = {"xywh": "xyxy", "xyxy": "xywh"}[box_format]
    beyond = ((boxes[:, 2] > width + SLACK) | (boxes[:, 3] > height + SLACK)).mean()
    if np.nanmax(boxes) <= 1 and (boxes % 1).any():
        return "no coordinate of a box is above 1: boxes must be in pixels, not in fractions of the image"
    kept = trainable({"boxes": boxes}, (height, width)).mean()
    if beyond > WRONG_FORMAT or kept < 1 - WRONG_FORMAT:
        return (
            f"{max(beyond, 1 - kept):.0%} of the boxes reach beyond their image, or have no area. They are read as "
            f"{box_format}; are they {other} (--data.box_format={other})?"
        )
    return None


def check_objects(findings: Sequence[Finding], name: Callable[[int], str], split: str, source: str) -> str | None:
    """Raises a `UserError` if an object must be mended; returns what to warn of if some are left out of training.

    Args:
        findings: Of a split.
        name: What messages call the image of a row.
        split: Name of the split.
        source: The data source.
    """
    for wrong in (True, False):
        found = [finding for finding in findings if finding.wrong == wrong]
        if not found:
            continue
        first = "; ".join(f"annotation {one.id} of {name(one.row)}: {one.reason}" for one in found[:SHOWN])
        more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        text = f"{len(found)} objects in the {split} split of '{source}'"
        if wrong:
            raise UserError(f"{text} are malformed. {first}{more}. Mend or remove them (linvit data check lists all)")
        return f"{text} are left out of training. {first}{more}"
    return None


def check_all_occur(names: Sequence[str], counts: np.ndarray, source: str) -> None:
    """Raises a `UserError` if a class has no training object."""
    absent = [name for name, count in zip(names, counts.tolist(), strict=True) if not count]
    if absent:
        raise UserError(
            f"{len(absent)} of the {len(names)} classes of '{source}' have no training object: {some(absent)}. Give "
            f"the classes that are meant by --data.class_names, or keep all with --data.empty_classes=true"
        )


def class_table(names: Sequence[str], ids: Sequence[Any], counts: Mapping[str, np.ndarray]) -> list[str]:
    """A line per class: its label, the category's id in the data, its name, and how many objects each split has."""
    wide = max(5, *map(len, names))
    lines = [f"label {'id':>6}  {'class':{wide}}" + "".join(f"{split:>10}" for split in counts)]
    for label, (name, key) in enumerate(zip(names, ids, strict=True)):
        objects = "".join(f"{own[label]:>10,}" for own in counts.values())
        lines.append(f"{label:>5} {key!s:>6}  {name:{wide}}{objects}")
    return lines


def _sizes(flat: FlatObjects, sizes: np.ndarray) -> np.ndarray:
    """Height and width (2, n) of the image of each object; infinite where it is not known."""
    known: np.ndarray = np.where(sizes > 0, sizes, np.inf)[flat.rows].T
    return known
