"""Audit of the objects of a dataset: those that are trained on, scored, left out or malformed, and messages on them."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import datasets
import numpy as np

from linvit.data.sources.coco import AnnotationFinding, mask_counts
from linvit.data.sources.object_column import ObjectColumn
from linvit.data.transforms.detection import EMPTY_MASK, left_out, trainable, usable
from linvit.errors import quote_first
from linvit.io import coco_masks

MIN_SIDE = 32  # pixels; training leaves out images with a shorter side, and those without objects, as mmdetection does
WRONG_FORMAT = 0.3  # fraction of boxes that reach out of their images, from which on they are taken for another format
SLACK = 1.0  # pixels by which a box may


class ObjectAudit(NamedTuple):
    """The objects of a split.

    `annotated` counts those of each image that are sound and of a class, int (rows,). `trained` and `scored` have the
    row and the label of each of them that training uses, and that evaluation scores: all but crowds; `training` says
    which of both the split is for. `left_out` names those of them that training leaves out, `malformed` those that
    cannot be read, `repeated` those that have the image, class and box of another one; `total` counts all, also those
    of other categories. `wrong_format` says if the boxes seem to be stored in another format.
    """

    annotated: np.ndarray
    trained: np.ndarray
    scored: np.ndarray
    training: bool
    num_classes: int
    crowds: int
    total: int
    left_out: list[AnnotationFinding]
    malformed: list[AnnotationFinding]
    repeated: list[AnnotationFinding]
    wrong_format: str | None

    @property
    def per_class(self) -> np.ndarray:
        """Number of objects of each class that are trained on or scored, int (K,)."""
        return np.bincount((self.trained if self.training else self.scored)[:, 1], minlength=self.num_classes)

    def of_rows(self, rows: np.ndarray) -> "ObjectAudit":
        """Returns the audit of some rows; malformed annotations are kept."""
        chosen = np.isin(np.arange(len(self.annotated)), rows)
        return self._replace(
            annotated=self.annotated * chosen,
            trained=self.trained[chosen[self.trained[:, 0]]],
            scored=self.scored[chosen[self.scored[:, 0]]],
            left_out=[one for one in self.left_out if chosen[one.row]],
        )


def audit_objects(
    rows: datasets.Dataset,
    column: ObjectColumn,
    sizes: np.ndarray,
    labels: Mapping[Any, int],
    subset: bool,
    masks: bool,
    training: bool,
    unread: Sequence[AnnotationFinding] = (),
) -> ObjectAudit:
    """Looks at all objects of a split, in the order of its rows.

    Args:
        rows: The table.
        column: Column of the objects.
        sizes: (H, W) of each image, 0 if unknown.
        labels: The label of each category.
        subset: True if objects of other categories are left out, false if they are malformed.
        masks: True if masks are trained.
        training: True of the training split, whose small images are left out.
        unread: Annotations that are malformed and not in the table.
    """
    cells = rows.select_columns([column.name]).with_format("arrow")[:][column.name].to_pylist()
    each = [column.lists(cell, f"row {row}") for row, cell in enumerate(cells)]
    lists = {field: [*chain.from_iterable(own[field] for own in each)] for field in column.fields}
    objects, categories = column.objects(lists), lists["category"]
    where = np.repeat(np.arange(len(each)), [len(own["bbox"]) for own in each])
    size = tuple(np.where(sizes > 0, sizes, np.inf)[where].T)  # infinite where it is not known
    sound = usable(objects, size)
    known = np.array([category in labels for category in categories], bool)
    corners = objects["boxes"].tolist()

    def findings(which: np.ndarray, reason: str, details: Sequence[Any] = corners) -> list[AnnotationFinding]:
        ids = lists.get("id") or range(len(where))
        places = np.flatnonzero(which).tolist()
        return [AnnotationFinding(int(where[i]), str(ids[i]), reason, str(details[i])) for i in places]

    unsound = "a box that is not four finite numbers, or is far outside of its image, or an infinite area"
    malformed = [
        *unread,
        *findings(~sound, unsound),
        *findings(sound & ~known & (not subset), "a category that is not among the classes", categories),
    ]
    if masks:
        pixels = _mask_areas(lists["segmentation"], sizes[where])
        malformed += findings(sound & known & (pixels < 0), "no segmentation, or a malformed one")
        sound &= pixels >= 0
    annotated = sound & known
    first: dict[Any, int] = {}
    keys = zip(where.tolist(), categories, map(tuple, corners), strict=True)
    again = np.array([first.setdefault(key, i) != i for i, key in enumerate(keys)], bool)
    reasons = {f"an image with a side of less than {MIN_SIDE} pixels": ~large_enough(sizes[where])} if training else {}
    reasons |= left_out(objects, size)
    if masks:
        reasons[EMPTY_MASK] = pixels == 0
    crowds = objects.get("iscrowd", np.zeros(len(where), bool))
    scored, unused = annotated & ~crowds, list[AnnotationFinding]()
    trained = (annotated if training else scored).copy()
    for reason, which in reasons.items():  # an object has the first of its reasons
        unused += findings(trained & which, reason)
        trained &= ~which
    used, evaluated = (
        np.array([(where[i], labels[categories[i]]) for i in np.flatnonzero(which)], np.int64).reshape(-1, 2)
        for which in (trained, scored)
    )
    return ObjectAudit(
        np.bincount(where[annotated], minlength=len(cells)),
        used,
        evaluated,
        training,
        len(labels),
        int(crowds.sum()),
        len(where) + len(unread),
        unused,
        malformed,
        findings(annotated & again, "the image, class and box of another one"),
        _wrong_format(objects["boxes"], size, column.box_format),
    )


def large_enough(sizes: np.ndarray) -> np.ndarray:
    """Returns which images of sizes (n, 2) are trained on, bool (n,): also those that cannot be read, of size 0."""
    shorter = sizes.min(1, initial=np.iinfo(np.int64).max)
    large: np.ndarray = (shorter >= MIN_SIDE) | (shorter == 0)
    return large


def _mask_areas(stored: Sequence[Any], sizes: np.ndarray) -> np.ndarray:
    """Returns the pixels of masks, int (n,): -1 of those that cannot be read, 1 where the image cannot."""
    found = np.where(sizes.min(1, initial=1) > 0, -1, 1)
    rles = {}
    for i in np.flatnonzero(found < 0).tolist():
        height, width = sizes[i].tolist()
        if (counts := mask_counts(stored[i], (height, width))) is not None:
            rles[i] = {"size": [height, width], "counts": counts}
    found[[*rles]] = coco_masks.area([*rles.values()])
    return found


def _wrong_format(boxes: np.ndarray, size: tuple[Any, ...], box_format: str) -> str | None:
    finite = np.isfinite(boxes).all(1)
    boxes, height, width = boxes[finite], size[0][finite], size[1][finite]
    if not len(boxes):
        return None
    if boxes.max() <= 1 and (boxes % 1).any():
        return "no coordinate of a box is above 1: boxes must be in pixels, not in fractions of the image"
    beyond = ((boxes[:, 2] > width + SLACK) | (boxes[:, 3] > height + SLACK)).mean()
    wrong = max(beyond, 1 - trainable({"boxes": boxes}, (height, width)).mean())
    other = "xywh" if box_format == "xyxy" else "xyxy"
    said = (
        f"{wrong:.0%} of the boxes reach beyond their image, or have no area. They are read as {box_format}; are they "
        f"{other} (--data.box_format={other})?"
    )
    return said if wrong > WRONG_FORMAT else None


def annotation_name(finding: AnnotationFinding, name: Callable[[int], str]) -> str:
    """Returns the name of an annotation in messages, given the function that names the image of a row."""
    return f"annotation {finding.id}" + (f" of {name(finding.row)}" if finding.row >= 0 else "")


def describe_findings(findings: Sequence[AnnotationFinding], name: Callable[[int], str]) -> list[str]:
    """Returns a line per kind of finding, the most frequent first, with its count and an example."""
    first = {finding.reason: finding for finding in reversed(findings)}
    return [
        f"{count:,} with {reason}, such as {annotation_name(first[reason], name)}"
        + (f": {first[reason].detail}" if first[reason].detail else "")
        for reason, count in Counter(finding.reason for finding in findings).most_common()
    ]


def say_left_out(found: ObjectAudit, name: Callable[[int], str]) -> str:
    """Says how many of the objects training leaves out, and why; "" if none."""
    if not found.left_out:
        return ""
    count, why = len(found.left_out), "; ".join(describe_findings(found.left_out, name))
    total = found.annotated.sum()
    return f"{count:,} of {total:,} objects ({count / total:.1%}): {why}"


def absent_classes(names: Sequence[str], counts: np.ndarray) -> str | None:
    """Returns the warning for classes without a training object, or None."""
    absent = [name for name, count in zip(names, counts.tolist(), strict=True) if not count]
    return f"{len(absent)} classes have no training object: {quote_first(absent)}" if absent else None


def class_table(names: Sequence[str], ids: Sequence[Any], counts: Mapping[str, np.ndarray]) -> list[str]:
    """Returns a line per class: its label, the category's id in the data, its name, and objects per split."""
    wide = max(5, *map(len, names))
    lines = [f"label {'id':>6}  {'class':{wide}}" + "".join(f"{split:>10}" for split in counts)]
    for label, (name, key) in enumerate(zip(names, ids, strict=True)):
        objects = "".join(f"{own[label]:>10,}" for own in counts.values())
        lines.append(f"{label:>5} {key!s:>6}  {name:{wide}}{objects}")
    return lines
