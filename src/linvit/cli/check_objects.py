"""`linvit data check` of images with objects: every box, category and size is held against the others."""

import argparse
from pathlib import Path

import numpy as np

from linvit.data.detection import DetectionData
from linvit.data.sources.coco import find_coco
from linvit.data.sources.columns import features_of
from linvit.data.sources.object_check import check_all_occur, class_table
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


def check(data: DetectionData) -> tuple[list[str], list[Finding]]:
    """Examines all objects.

    Returns:
        Lines about each split and each class; and what is bad, under the names of the images.
    """
    source = data.data_source
    assert isinstance(source, ObjectSource)
    lines: list[str] = []
    bad: list[Finding] = []
    counts = {}
    for split, rows in data.splits.items():
        if source.column is None or source.column.name not in rows.features:
            lines.append(f"  {split:<10}no objects")
            continue
        found = data.look(split)
        flat, counts[split] = found.flat, found.counts
        crowds = int(flat.objects["iscrowd"].sum()) if "iscrowd" in flat.objects else 0
        without = len(rows) - len(np.unique(flat.rows))
        lines.append(
            f"  {split:<10}{len(rows):>12,} images, {without:,} of them without objects; {len(flat.rows):,} objects, "
            f"{crowds:,} of them crowds"
        )
        untrained = [finding for finding in found.findings if not finding.wrong]
        if untrained:
            first = f"annotation {untrained[0].id} of {source.name_of(rows, untrained[0].row)}: {untrained[0].reason}"
            lines.append(f"  {split:<10}WARNING: training leaves out {len(untrained):,} of them, such as {first}")
        for finding in found.findings:
            if finding.wrong:
                named = f"annotation {finding.id} of {source.name_of(rows, finding.row)}"
                bad.append(Finding(split, named, finding.reason))
        if found.wrong_format is not None:
            bad.append(Finding(split, "boxes", found.wrong_format))
        stored, said = source.header_sizes(split, rows, data.exif_orientation), data.sizes(split)
        for row in np.flatnonzero((stored.min(1) > 0) & (stored != said).any(1)).tolist():
            (height, width), (rows_said, columns_said) = stored[row].tolist(), said[row].tolist()
            reason = f"its annotations are for {columns_said} x {rows_said} pixels, the image has {width} x {height}"
            bad.append(Finding(split, source.name_of(rows, row), reason))
    lines += [f"  {line}" for line in class_table(data.class_names, data.classes.ids, counts)]
    if "train" in counts:
        try:
            check_all_occur(data.class_names, counts["train"], data.source)
        except UserError as error:
            bad.append(Finding("train", "classes", str(error)))
    return lines, bad
