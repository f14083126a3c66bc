"""Looks at all objects of a split before the first step: boxes, categories, classes without objects."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from linvit.data.sources.coco_json import AnnotationFinding
from linvit.data.sources.objects import FlatObjects
from linvit.data.transforms.detection import inside, trainable, usable
from linvit.errors import UserError, quote_first

WRONG_FORMAT = 0.3  # fraction of boxes that reach out of their images, from which on they are taken for another format
SLACK = 1.0  # pixels by which a box may


class ObjectAudit(NamedTuple):
    """The objects of a split: which are of a class and sound, bool (n,), and how many each class has, int (K,).

    `total` counts malformed annotations, too; `untrained` are left out of training though the data do not say so.
    `wrong_format` says if the boxes seem to be stored in another format.
    """

    flat: FlatObjects
    used: np.ndarray
    counts: np.ndarray
    total: int
    malformed: list[AnnotationFinding]
    untrained: list[AnnotationFinding]
    wrong_format: str | None


def audit_objects(
    flat: FlatObjects,
    sizes: np.ndarray,
    labels: Mapping[Any, int],
    subset: bool,
    box_format: str,
    unread: Sequence[AnnotationFinding] = (),
) -> ObjectAudit:
    """Looks at all objects of a split, given (H, W) of each image, int (rows, 2), 0 of one that cannot be read.

    With a `subset` of the categories, others are left out on purpose; `unread` are malformed and not among the objects.
    """
    objects, categories = flat.objects, flat.categories.tolist()
    height, width = np.where(sizes > 0, sizes, np.inf)[flat.rows].T  # infinite where it is not known
    sound, kept = usable(objects, (height, width)), trainable(objects, (height, width))
    known = np.array([category in labels for category in categories], bool)
    finite = np.isfinite(objects["boxes"]).all(1)
    sides = objects["boxes"][:, 2:] - objects["boxes"][:, :2]
    thin, outside = (sides < 1).any(1), ~inside(objects["boxes"], (height, width))
    meant = np.logical_or.reduce([~sound, *(objects[flag] for flag in ("iscrowd", "ignore") if flag in objects)])

    def findings(
        which: np.ndarray, reason: str, details: Sequence[Any], malformed: bool = False
    ) -> list[AnnotationFinding]:
        places = np.flatnonzero(which).tolist()
        return [
            AnnotationFinding(int(flat.rows[i]), str(flat.ids[i]), reason, str(details[i]), malformed) for i in places
        ]

    boxes = objects["boxes"].tolist()
    unsound = "a box that is not four finite numbers, or is far outside of its image, or an infinite area"
    return ObjectAudit(
        flat,
        sound & known,
        np.bincount([labels[categories[i]] for i in np.flatnonzero(sound & known)], minlength=len(labels)),
        len(flat.rows) + len(unread),
        [
            *unread,
            *findings(~sound, unsound, boxes, True),
            *findings(sound & ~known & (not subset), "a category that is none of the classes", categories, True),
        ],
        [
            *findings(thin & ~meant, "a box with a side of less than a pixel", boxes),
            *findings(outside & ~thin & ~meant, "a box outside of its image", boxes),
            *findings(~kept & ~outside & ~thin & ~meant, "an area of 0", boxes),
        ],
        _wrong_format(objects["boxes"][finite], (height[finite], width[finite]), box_format),
    )


def _wrong_format(boxes: np.ndarray, size: tuple[np.ndarray, np.ndarray], box_format: str) -> str | None:
    if not len(boxes):
        return None
    height, width = size
    other = {"xywh": "xyxy", "xyxy": "xywh"}[box_format]
    beyond = ((boxes[:, 2] > width + SLACK) | (boxes[:, 3] > height + SLACK)).mean()
    if boxes.max() <= 1 and (boxes % 1).any():
        return "no coordinate of a box is above 1: boxes must be in pixels, not in fractions of the image"
    kept = trainable({"boxes": boxes}, size).mean()
    if beyond > WRONG_FORMAT or kept < 1 - WRONG_FORMAT:
        return (
            f"{max(beyond, 1 - kept):.0%} of the boxes reach beyond their image, or have no area. They are read as "
            f"{box_format}; are they {other} (--data.box_format={other})?"
        )
    return None


def annotation_name(finding: AnnotationFinding, name: Callable[[int], str]) -> str:
    """What messages call an annotation, by what they call the image of a row."""
    return f"annotation {finding.id}" + (f" of {name(finding.row)}" if finding.row >= 0 else "")


def describe_findings(findings: Sequence[AnnotationFinding], name: Callable[[int], str]) -> list[str]:
    """How many annotations have what, the most frequent first, each with an example in an image by its name."""
    first = {finding.reason: finding for finding in reversed(findings)}
    return [
        f"{count:,} with {reason}, such as {annotation_name(first[reason], name)}"
        + (f": {first[reason].detail}" if first[reason].detail else "")
        for reason, count in Counter(finding.reason for finding in findings).most_common()
    ]


def audit_lines(found: ObjectAudit, split: str, images: int, name: Callable[[int], str]) -> list[str]:
    """What `linvit data check` says of a split of so many images; `name` is what messages call that of a row."""
    flat = found.flat
    crowds = int(flat.objects["iscrowd"].sum()) if "iscrowd" in flat.objects else 0
    lines = [
        f"  {split:<10}{images:>12,} images, {images - len(np.unique(flat.rows)):,} of them without objects; "
        f"{len(flat.rows):,} objects, {crowds:,} of them crowds"
    ]
    if found.malformed:
        lines.append(f"  {split:<10}{len(found.malformed):>12,} of {found.total:,} ANNOTATIONS ARE MALFORMED")
        lines += [f"    {line}" for line in describe_findings(found.malformed, name)]
    if found.untrained:
        lines.append(f"  {split:<10}WARNING: training leaves out {len(found.untrained):,} objects")
        lines += [f"    {line}" for line in describe_findings(found.untrained, name)]
    return lines


def check_all_occur(names: Sequence[str], counts: np.ndarray, source: str) -> None:
    """Raises a `UserError` if a class has no training object."""
    absent = [name for name, count in zip(names, counts.tolist(), strict=True) if not count]
    if absent:
        raise UserError(
            f"{len(absent)} of the {len(names)} classes of '{source}' have no training object: {quote_first(absent)}. "
            f"Give the classes that are meant by --data.class_names, or keep all with --data.empty_classes=true"
        )


def class_table(names: Sequence[str], ids: Sequence[Any], counts: Mapping[str, np.ndarray]) -> list[str]:
    """A line per class: its label, the category's id in the data, its name, and how many objects each split has."""
    wide = max(5, *map(len, names))
    lines = [f"label {'id':>6}  {'class':{wide}}" + "".join(f"{split:>10}" for split in counts)]
    for label, (name, key) in enumerate(zip(names, ids, strict=True)):
        objects = "".join(f"{own[label]:>10,}" for own in counts.values())
        lines.append(f"{label:>5} {key!s:>6}  {name:{wide}}{objects}")
    return lines
