"""`linvit data check` of images with objects: every box, category and size is held against the others."""

import argparse
from functools import partial
from pathlib import Path

import numpy as np

from linvit.data.detection import DetectionData
from linvit.data.sources.coco import find_coco
from linvit.data.sources.columns import features_of
from linvit.data.sources.images import wrong_size
from linvit.data.sources.object_check import annotation_name, check_all_occur, class_table, describe
from linvit.data.sources.object_source import ObjectSource
from linvit.data.sources.objects import COLUMNS
from linvit.data.sources.scan import Finding
from linvit.data.sources.splits import HUB, kind_of, load_splits
from linvit.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say how objects are stored."""
    parser.add_argument("--masks", action="store_true", help="of objects: read their masks, too")
    parser.add_argument("--box_format", default="xywh", choices=["xywh", "xyxy"], help="of objects in a table")


def has_objects(source: str) -> bool:
    """Whether a data source is a folder with COCO's files, or a table with a column of objects."""
    path = Path(source).expanduser()
    if not source.startswith(HUB) and path.is_dir() and find_coco(path):
        return True
    table = source.startswith(HUB) or (path.exists() and kind_of(path) in ("saved", "parquet", "arrow"))
    return table and not {*COLUMNS}.isdisjoint(features_of(load_splits(source)))


def check(data: DetectionData, with_masks: DetectionData | None) -> tuple[list[str], list[Finding], list[Finding]]:
    """Examines all objects.

    Args:
        data: The set.
        with_masks: The same set with masks, if they are looked at although they are not asked for.

    Returns:
        Lines about each split and each class; images that are bad, and annotations that are, under their images' names.
    """
    source = data.data_source
    assert isinstance(source, ObjectSource)
    lines: list[str] = []
    bad: list[Finding] = []
    malformed: list[Finding] = []
    counts = {}
    for split, rows in data.splits.items():
        if source.column is None or source.column.name not in rows.features:
            lines.append(f"  {split:<10}no objects")
            continue
        found, name = data.audit(split), partial(data.name_of, split)
        flat, counts[split] = found.flat, found.counts
        crowds = int(flat.objects["iscrowd"].sum()) if "iscrowd" in flat.objects else 0
        without = len(rows) - len(np.unique(flat.rows))
        lines.append(
            f"  {split:<10}{len(rows):>12,} images, {without:,} of them without objects; {len(flat.rows):,} objects, "
            f"{crowds:,} of them crowds"
        )
        if found.malformed:
            lines.append(f"  {split:<10}{len(found.malformed):>12,} of {found.total:,} ANNOTATIONS ARE MALFORMED")
            lines += [f"    {line}" for line in describe(found.malformed, name)]
        if found.untrained:
            lines.append(f"  {split:<10}WARNING: training leaves out {len(found.untrained):,} objects")
            lines += [f"    {line}" for line in describe(found.untrained, name)]
        malformed += [
            Finding(split, annotation_name(one, name), f"{one.reason}: {one.detail}" if one.detail else one.reason)
            for one in found.malformed
        ]
        masks = [] if with_masks is None else with_masks.audit(split).malformed
        masks = [one for one in masks if "segmentation" in one.reason]
        if masks:
            lines.append(
                f"  {split:<10}WARNING: {len(masks):,} objects have no usable mask; to train without masks, give"
            )
            lines.append("    --data.masks=false and a head without masks, such as --model.head=faster_rcnn")
            lines += [f"    {line}" for line in describe(masks, name)]
        if found.wrong_format is not None:
            bad.append(Finding(split, "boxes", found.wrong_format))
        stored, said = source.header_sizes(split, rows, data.exif_orientation), data.sizes(split)
        for row in np.flatnonzero((stored.min(1) > 0) & (stored != said).any(1)).tolist():
            bad.append(Finding(split, name(row), wrong_size("its annotations are for", said[row], stored[row])))
    lines += [f"  {line}" for line in class_table(data.class_names, data.classes.ids, counts)]
    if "train" in counts:
        try:
            check_all_occur(data.class_names, counts["train"], data.source)
        except UserError as error:
            bad.append(Finding("train", "classes", str(error)))
    return lines, bad, malformed
