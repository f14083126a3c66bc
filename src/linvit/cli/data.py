"""`linvit data check`: looks at every image of a set before hours are spent on it."""

import argparse
import os
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from linvit.cli import check_bands, check_objects, check_pairs, tile
from linvit.data.classification import ClassificationData
from linvit.data.detection import DetectionData
from linvit.data.segmentation import SegmentationData
from linvit.data.sources.folder import ignored_files
from linvit.data.sources.labels import check_labels
from linvit.data.sources.object_source import ObjectSource
from linvit.data.sources.pairs import has_masks
from linvit.data.sources.read import MAX_PIXELS
from linvit.data.sources.scan import Finding, ScanResult, scan
from linvit.data.sources.splits import HUB, kind_of
from linvit.data.transforms.segmentation import SegmentationAugmentation
from linvit.errors import UserError
from linvit.plain_text import CsvWriter
from linvit.terminal import reflow

EPILOG = """examples:
  linvit data check path/to/imagenet    an image folder: train/CLASS/*.jpg,
                                        val/CLASS/*.jpg
  linvit data check path/to/imagenet --output bad.csv
                                        writes the list of bad images
  linvit data check path/to/parquet --workers 16
  linvit data check hub:owner/name
  linvit data check path/to/ade --class_names ade20k --reduce_zero_label
                                        images and masks
  linvit data check path/to/coco --masks
                                        images and objects with masks
  linvit data check path/to/scenes --num_classes 6 --bands [4,1,2]
                                        GeoTIFFs of which three bands are used:
                                        their percentiles, and the options that
                                        linvit fit needs

Every image is decoded as training decodes it. The exit code is 1 if an image or
a label is bad or if linvit fit would refuse the set, else 0. These are warnings
only: images that are in two splits, classes with training images and no
validation images, folders of classes without images, and files that are not
read, such as HEIC.
"""
SHOWN = 20  # bad images and copies that are printed


def main(argv: list[str]) -> int:
    """Runs `linvit data check`; prints what was found and returns 1 if something is bad, else 0.

    Raises:
        UserError: If the data cannot be found or read at all.
    """
    parser = argparse.ArgumentParser("linvit data", description="Looks at data sets, and cuts large pictures.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="check|tile")
    check = verbs.add_parser(
        "check",
        help="decode every image of a set and list the bad ones",
        description=reflow(__doc__ or ""),
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    check.add_argument(
        "source", metavar="PATH", help="what --data.source takes: a folder, parquet, arrow, hub:owner/name"
    )
    check.add_argument("--output", type=Path, metavar="FILE", help="write split, image and reason of bad images as CSV")
    check.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    check.add_argument("--image_column", help="column of the images; found if left out")
    check.add_argument("--label_column", help="column of the labels; found if left out")
    check.add_argument(
        "--max_pixels", type=int, default=MAX_PIXELS, help="larger images are bad (default: %(default)s)"
    )
    check_bands.add_arguments(check)
    check_pairs.add_arguments(check)
    check_objects.add_arguments(check)
    tile.add_parser(verbs)
    args = parser.parse_args(argv)
    if args.verb == "tile":
        return tile.run(args)
    if args.workers < 0:
        raise UserError(f"--workers must be 0 or more; got {args.workers}")
    if args.output is not None and not args.output.absolute().parent.is_dir():
        raise UserError(f"cannot write '{args.output}': there is no folder '{args.output.absolute().parent}'")

    if has_masks(args.source):
        return _check_masks(args)
    if check_objects.has_objects(args.source):
        return _check_objects(args)
    data = ClassificationData(
        args.source,
        image_column=args.image_column,
        label_column=args.label_column,
        max_pixels=args.max_pixels,
        **check_bands.options(args),
    )
    image = data.image_column
    pictures = {split: rows for split, rows in data.splits.items() if image in rows.features}
    wrong = _columns(data) or _training(data)
    found = scan(pictures, image, args.max_pixels, args.workers, on_hub=args.source.startswith(HUB), bands=data.bands)
    _report([*_summary(data, found), *check_bands.lines(data, args), *wrong], found, args)
    return int(bool(found.bad or wrong))


def _check_masks(args: argparse.Namespace) -> int:
    """Looks at images and masks; see `main`."""
    given = {"num_classes": args.num_classes, "reduce_zero_label": args.reduce_zero_label}
    given |= check_bands.options(args) | {"augmentation": SegmentationAugmentation(photometric=False)}
    data = SegmentationData(args.source, class_names=args.class_names, max_pixels=args.max_pixels, **given)
    lines, bad = check_pairs.check(data, args.workers, SHOWN)
    found = scan(data.splits, data.image_column, args.max_pixels, args.workers, bands=data.bands)
    found.bad += [Finding("mask", mask.name, mask.reason) for mask in bad]
    _report([f"{data.source}: {data.num_classes} classes", *lines, *check_bands.lines(data, args)], found, args)
    return int(bool(found.bad))


def _check_objects(args: argparse.Namespace) -> int:
    """Looks at images and objects; see `main`."""
    given = {"masks": args.masks, "box_format": args.box_format, "class_names": args.class_names}
    given |= check_bands.options(args)
    data = DetectionData(args.source, image_column=args.image_column, max_pixels=args.max_pixels, **given)
    on_hub = args.source.startswith(HUB)
    is_coco = isinstance(data.data_source, ObjectSource) and data.data_source.coco is not None
    look_too = is_coco and not args.masks and find_spec("faster_coco_eval") is not None
    with_masks = DetectionData(args.source, **given | {"masks": True}) if look_too else None
    lines, bad, malformed = check_objects.check(data, with_masks)
    found = scan(data.splits, data.image_column, args.max_pixels, args.workers, on_hub=on_hub, bands=data.bands)
    found.bad += bad
    _report(
        [f"{data.source}: {data.num_classes} classes", *lines, *check_bands.lines(data, args)], found, args, malformed
    )
    return int(bool(found.bad or malformed))


def _report(
    lines: Sequence[str], found: ScanResult, args: argparse.Namespace, malformed: Sequence[Finding] = ()
) -> None:
    """Prints lines and what was found in the images, and writes what is bad, malformed annotations too."""
    print("\n".join([*lines, *_bad(found, args.output), *_ignored(args.source), *_copies(found)]))
    if args.output is not None:
        with args.output.open("w", encoding="utf-8", newline="") as file:
            rows = [(bad.split, bad.name, bad.reason) for bad in (*found.bad, *malformed)]
            CsvWriter(file).writerows([("split", "image", "reason"), *rows])


def _columns(data: ClassificationData) -> list[str]:
    """A line for each split that has no column of images, or labels outside the classes."""
    image, label = data.image_column, data.label_column
    wrong = []
    for split, rows in data.splits.items():
        if image not in rows.features:
            wrong.append(f"  NO IMAGES  the {split} split has no column '{image}'; it has: {', '.join(rows.features)}")
            continue
        try:
            if label is not None and split in data.labelled:
                check_labels(rows, image, label, data.num_classes or 0, split, data.source)
        except UserError as error:
            wrong.append(f"  BAD LABELS  {error}")
    return wrong


def _training(data: ClassificationData) -> list[str]:
    """Why `linvit fit` would refuse the set, in a line; one split without labels is there to be predicted."""
    if "train" not in data.splits or (len(data.splits) == 1 and not data.labelled):
        return []
    try:
        data.setup("fit")
    except UserError as error:
        return [f"  NO TRAINING  {error}"]
    return []


def _summary(data: ClassificationData, found: ScanResult) -> list[str]:
    classes = "no labels" if data.label_column is None else f"{data.num_classes} classes"
    lines = [f"{data.source}: {found.images.total():,} images, {classes}"]
    for split, rows in data.splits.items():
        each = _per_class(data, rows) if split in data.labelled else ", no labels" if data.labelled else ""
        lines.append(f"  {split:<10}{found.images[split]:>12,} images{each}")
    smallest, median, largest = found.sizes().tolist()
    lines += [
        f"  {'formats':<10}{_counted(found.kinds)}",
        f"  {'modes':<10}{_counted(found.modes)}",
        f"  {'width':<10}{smallest[0]} to {largest[0]}, median {median[0]}",
        f"  {'height':<10}{smallest[1]} to {largest[1]}, median {median[1]}",
    ]
    if found.turned:
        lines.append(f"  turned as their EXIF entry says: {found.turned:,}")
    if found.animated:
        lines.append(f"  with several frames, of which the first is taken: {found.animated:,}")
    return lines


def _per_class(data: ClassificationData, rows: object) -> str:
    labels = np.array([value for value in rows[data.label_column] if value is not None and value >= 0])  # type: ignore[index]
    counts = np.bincount(labels.astype(int), minlength=data.num_classes or 0)
    empty = int((counts == 0).sum())
    return f", {counts.min()} to {counts.max()} of each class" + (f", {empty} classes have none" if empty else "")


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.most_common()) or "none"


def _bad(found: ScanResult, output: Path | None) -> list[str]:
    if not found.bad:
        return ["  no bad images"]
    more = len(found.bad) - SHOWN
    where = f"all of them are in {output}" if output else "--output FILE lists all"
    return [
        f"  {len(found.bad):,} BAD IMAGES",
        *(f"    {bad.name}: {bad.reason}" for bad in found.bad[:SHOWN]),
        *([f"    and {more:,} more; {where}"] if more > 0 else []),
    ]


def _ignored(source: str) -> list[str]:
    """A line for each kind of file in a folder of images that is not read."""
    path = Path(source).expanduser()
    if source.startswith(HUB) or not path.is_dir() or kind_of(path) is not None:
        return []
    files = ignored_files(path)
    endings = [os.path.splitext(file)[1].lower() for file in files]
    first = dict(zip(reversed(endings), reversed(files), strict=True))
    return [f"  WARNING: files that are not read: {len(files):,}"] * bool(files) + [
        f"    {count:,} {ending or 'without an ending'}, such as {first[ending]}"
        for ending, count in Counter(endings).most_common(SHOWN)
    ]


def _copies(found: ScanResult) -> list[str]:
    if not found.copies:
        return []
    more = len(found.copies) - SHOWN
    return [
        f"  WARNING: images in two splits: {len(found.copies):,}",
        *(f"    {first}  =  {second}" for first, second in found.copies[:SHOWN]),
        *([f"    and {more:,} more"] if more > 0 else []),
    ]
