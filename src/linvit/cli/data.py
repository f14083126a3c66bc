"""`linvit data`: checks every image of a dataset before training; cuts large pictures with masks into tiles."""

import argparse
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

import linvit.data
from linvit.callbacks.report import write_table
from linvit.data.base import ImageData, TargetReport
from linvit.data.sources.folder import ignored_files
from linvit.data.sources.labels import read_names
from linvit.data.sources.other_annotations import other_annotations
from linvit.data.sources.scan import ScanResult, describe_bands, scan
from linvit.data.sources.splits import folder_of_images
from linvit.data.sources.tiles import SETS, cut, find_areas, isprs_areas, read_classes, read_mask
from linvit.data.transforms.decode import Bands
from linvit.errors import UserError, check_number
from linvit.io.files import new_folder
from linvit.io.terminal import RAW
from linvit.runs.parser import Parser, options_of, readable

EPILOG = """examples:
  linvit data check path/to/imagenet    an image folder: train/CLASS/*.jpg,
                                        val/CLASS/*.jpg
  linvit data check path/to/imagenet --output bad.csv
                                        writes the list of bad images
  linvit data check hub:owner/name --workers 16
  linvit data check path/to/ade --class_names ade20k --reduce_zero_label
                                        images and masks
  linvit data check path/to/coco --masks
                                        images and objects with masks
  linvit data check path/to/scenes --num_classes 6 --bands [4,1,2]
                                        three bands of GeoTIFFs:
                                        their percentiles, and the options that
                                        linvit fit needs
  linvit data check recall --pairs 8    a diagnostic task: chance and ceiling
  linvit data check path/to/set --data SegmentationData --num_classes 2
                                        the task, if it cannot be detected

It takes the --data options of linvit fit, in full or in short:
--data.num_classes=6, or --num_classes 6. Every image is decoded as training
decodes it. The exit code is 1 if an image or a label is bad or if
linvit fit would reject the dataset, else 0; duplicate images, classes
without images and files that are not read are warnings.
"""
TILE = """examples:
  linvit data tile folder --images pictures --masks labels --val north \\
      --output data/tiles --size 512 --stride 384
  linvit data tile vaihingen --images top --masks gts --eval_masks gts_eroded \\
      --output data/vaihingen
  linvit data tile potsdam --images 2_Ortho_RGB --masks 5_Labels_all \\
      --output data/potsdam --size 512 --stride 256

The output is a folder of images and masks for --data.source. Pictures keep
their bands, bits and georeference; masks of a folder keep their numbers or
colours (--data.mask_values), those of the ISPRS datasets become the classes of
--data.class_names=isprs. Tiles of validation and test do not overlap, so each
pixel counts once. linvit predict takes whole pictures: --model.window=512.
"""
SHOWN = 20  # maximum number of bad images and copies to print
TASKS: list[type[ImageData]] = [getattr(linvit.data, name) for name in linvit.data.__all__ if name.endswith("Data")]
UNRECOGNISED = (linvit.data.ClassificationData, linvit.data.SegmentationData, linvit.data.DetectionData)
"""Tasks for data that no task recognises: the first one with the given options is used."""


def main(argv: list[str]) -> int:
    """Runs `linvit data check`; prints the results and returns 1 if something is bad, else 0."""
    parser = argparse.ArgumentParser("linvit data", description="Checks datasets and cuts large pictures into tiles.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="check|tile")
    check = _add_verb(verbs, "check", "decode every image of a dataset, and list the bad ones", EPILOG)
    source = "as --data.source: a folder, parquet, arrow, hub:owner/name"
    check.add_argument("source", metavar="PATH", help=source)
    check.add_argument("--output", type=Path, metavar="FILE", help="write split, image and reason of bad images as CSV")
    check.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    names = [task.__name__ for task in TASKS]
    check.add_argument("--data", choices=names, metavar="TASK", help=f"{', '.join(names)}; detected by default")
    tasks: list[type] = [*TASKS]
    for name, option in {name: one for task in tasks for name, one in options_of(task).items()}.items():
        short = [f"--{name}"] * (name != "source")
        flag: dict[str, Any] = {"nargs": "?", "const": "true"} if option.type is bool else {}
        check.add_argument(f"--data.{name}", *short, help=argparse.SUPPRESS, **flag)
    _add_tile(verbs)
    args = parser.parse_args(argv)
    if args.verb == "tile":
        return _tile(args)
    check_number("--workers", args.workers, at_least=0, whole=True)
    if args.output is not None and not args.output.absolute().parent.is_dir():
        raise UserError(f"cannot write '{args.output}': the folder '{args.output.absolute().parent}' does not exist")

    with _collected() as warned:
        return _check(args, warned)


def _check(args: argparse.Namespace, warned: list[str]) -> int:
    """Prints results and warnings, and returns 1 if something is bad."""
    given = {name: value for name, value in vars(args).items() if name.startswith("data.") and value is not None}
    data = _module(_task(args.source, args.data, {*given}), {"data.source": args.source, **given})
    if isinstance(data, linvit.data.DiagnosticData | linvit.data.PathfinderData):
        print("\n".join(data.facts()))
        return 0
    if data.data_source.streaming:
        raise UserError(
            "linvit data check reads rows in any order, which a stream does not support; remove --data.streaming"
        )
    image, reader = data.image_column, data.data_source.images
    pictures = {split: rows for split, rows in data.splits.items() if image in rows.features}
    refused = [
        f"  NO IMAGES  the {split} split has no column '{image}'; it has: {', '.join(rows.features)}"
        for split, rows in data.splits.items()
        if split not in pictures
    ]
    found = scan(pictures, image, reader, args.workers)
    report = TargetReport([f"{args.source}: {found.images.total():,} images"])
    try:
        report = data.check_targets(found, args.workers)
        if report.trainable and not (refused or report.malformed or report.refused):
            data.setup("fit")
    except UserError as error:
        refused.append(f"  NO TRAINING  {error}")
    found.bad += report.bad
    rows = pictures.get("train") or next(iter(pictures.values()))
    bands = describe_bands(rows, image, reader)
    task = f"  {'task':<10}{type(data).__name__}; --data chooses another"
    print("\n".join([*report.lines, *[task] * (args.data is None), *bands, *report.refused, *refused]))
    warnings_of_data = [f"  WARNING: {text}" for text in warned]
    print("\n".join([*_bad(found, args.output), *warnings_of_data, *_ignored(args.source, data), *_copies(found)]))
    if args.output is not None:
        lines = [(bad.split, bad.name, bad.reason) for bad in (*found.bad, *report.malformed, *report.noted)]
        write_table(args.output, [("split", "image", "reason"), *lines])
    return int(bool(found.bad or refused or report.malformed or report.refused))


@contextmanager
def _collected() -> Iterator[list[str]]:
    """Collects linvit's warnings, each text once; other warnings are shown as usual."""
    told: list[str] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("always", module=r"linvit\.")  # also those that PYTHONWARNINGS hides
        shown = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], filename: str, lineno: int, *more: Any) -> None:
            if not filename.startswith(os.path.dirname(linvit.__file__)):
                shown(message, category, filename, lineno, *more)
            elif str(message) not in told:
                told.append(str(message))

        warnings.showwarning = show  # type: ignore[assignment]
        try:
            yield told
        except UserError:
            sys.stderr.writelines(f"linvit: warning: {text}\n" for text in told)  # there is no report
            raise


def _task(source: str, asked: str | None, given: Set[str]) -> type[ImageData]:
    """Returns the data module that was asked for, or the one that recognises the source and has the options."""
    likely = [task for task in TASKS if (task.__name__ == asked if asked else task.recognises(source))]
    missing = {task: sorted(given - _options(task)) for task in likely or UNRECOGNISED}
    task = min(missing, key=lambda task: len(missing[task]))
    if missing[task]:
        also = [other.__name__ for other in TASKS if given <= _options(other)]
        others = f", or choose another task: --data {' or '.join(also)}" if also else ""
        raise UserError(
            f"'{source}' is checked for {task.__name__}, which has no option {', '.join(missing[task])}; leave it "
            f"out{others}"
        )
    return task


def _options(task: type) -> set[str]:
    return {f"data.{name}" for name in options_of(task)}


def _module(task: type[ImageData], given: Mapping[str, str]) -> ImageData:
    """Returns the data module with the given options, read as `linvit fit` reads them."""
    parser = Parser()
    parser.add_class_arguments(task, "data")
    parser.set_defaults({f"data.{name}": value for name, value in task.check_defaults.items()})
    try:
        options = parser.parse_args([f"--{name}={value}" for name, value in given.items()])
    except argparse.ArgumentError as error:
        raise UserError(readable(str(error))) from error
    if "bands" in options.data:
        channels = Bands.parse(options.data.bands, options.data.value_range).channels
        for name in {"mean", "std"}.difference(name.removeprefix("data.") for name in given):
            options.data[name] = [0.5] * channels  # not used here
    module: ImageData = parser.instantiate(options).data
    return module


def _add_verb(verbs: Any, name: str, what: str, epilog: str) -> argparse.ArgumentParser:
    about = f"{what.capitalize()}."
    options: dict[str, Any] = {"description": about, "epilog": epilog, "formatter_class": RAW, "allow_abbrev": False}
    return verbs.add_parser(name, help=what, **options)  # type: ignore[no-any-return]


def _bad(found: ScanResult, output: Path | None) -> list[str]:
    if not found.bad:
        return ["  no bad images"]
    where = f"; all of them are in {output}" if output else "; --output FILE lists all"
    return [f"  {len(found.bad):,} BAD IMAGES", *_first([f"{bad.name}: {bad.reason}" for bad in found.bad], where)]


def _ignored(source: str, data: ImageData) -> list[str]:
    """Returns a line for each kind of file in an image folder that is not read, and for annotations of objects."""
    folder = folder_of_images(source)
    if folder is None:
        return []
    files = ignored_files(folder)
    endings = [os.path.splitext(file)[1].lower() for file in files]
    first = dict(zip(reversed(endings), reversed(files), strict=True))
    lines = [f"  WARNING: files that are not read: {len(files):,}"] * bool(files) + [
        f"    {count:,} {ending or 'without an ending'}, such as {first[ending]}"
        for ending, count in Counter(endings).most_common(SHOWN)
    ]
    objects = "" if isinstance(data, linvit.data.DetectionData) else other_annotations(folder)
    return lines + [f"  WARNING: annotations of objects are not used: {objects}"] * bool(objects)


def _copies(found: ScanResult) -> list[str]:
    lines = []
    for what, pairs in (("in two splits", found.copies), ("that are twice in a split", found.twins)):
        lines += [f"  WARNING: images {what}: {len(pairs):,}"] * bool(pairs)
        lines += _first([f"{first}  =  {second}" for first, second in pairs])
    return lines


def _first(lines: list[str], where: str = "") -> list[str]:
    more = [f"and {len(lines) - SHOWN:,} more{where}"] * (len(lines) > SHOWN)
    return [f"    {line}" for line in [*lines[:SHOWN], *more]]


def _add_tile(verbs: Any) -> None:
    tile = _add_verb(verbs, "tile", "cut large pictures with masks into tiles, once", TILE)
    tile.add_argument("set", choices=["folder", *sorted(SETS)], help="any folders, or an ISPRS dataset with its splits")
    tile.add_argument("--images", type=Path, required=True, help="folder of the pictures, or of train/, val/, test/")
    tile.add_argument("--masks", type=Path, required=True, help="folder of the masks; for ISPRS, the colour-coded ones")
    tile.add_argument("--eval_masks", type=Path, help="for ISPRS: masks of validation and test, with eroded boundaries")
    tile.add_argument("--mask_suffix", default="", help="suffix of mask names after the name of their picture")
    tile.add_argument("--val", nargs="+", default=[], metavar="NAME", help="pictures for validation, without extension")
    tile.add_argument("--test", nargs="+", default=[], metavar="NAME", help="pictures for testing")
    tile.add_argument("--output", type=Path, required=True, help="a new folder")
    tile.add_argument("--size", type=int, default=1024, help="side of a tile (default: %(default)s)")
    tile.add_argument("--stride", type=int, help="step between training tiles (default: half of the size)")


def _tile(args: argparse.Namespace) -> int:
    stride = max(args.size // 2, 1) if args.stride is None else args.stride
    if not 0 < stride <= args.size:
        raise UserError(f"--stride must be between 1 and --size={args.size}; got {stride}")
    if args.output.exists():
        raise UserError(f"'{args.output}' exists; remove it, or choose another --output")
    of_folder = args.set == "folder"
    if of_folder and args.eval_masks is not None:
        raise UserError("--eval_masks is for ISPRS datasets; put masks of validation and test into folders of splits")
    if not of_folder and (args.val or args.test or args.mask_suffix):
        raise UserError(f"{args.set} defines its splits and names; remove --val, --test and --mask_suffix")
    chosen = (
        find_areas(args.images, args.masks, args.mask_suffix, args.val, args.test)
        if of_folder
        else isprs_areas(SETS[args.set], args.images, args.masks, args.eval_masks)
    )
    tiles: Counter[str] = Counter()
    with new_folder(args.output) as prepared:
        for area in tqdm(chosen, unit=" pictures"):
            mask, strays = (read_mask(area.mask), 0) if of_folder else read_classes(area.mask)
            tiles[area.split] += cut(area, mask, args.size, stride, prepared)
            if strays:
                tqdm.write(f"{area.mask}: {strays:,} pixels have a colour of no class, and are ignored")
    counted = ", ".join(f"{split} {tiles[split]:,}" for split in ("train", "val", "test"))
    classes = "" if of_folder else f" of the classes {', '.join(read_names('isprs'))}"
    print(f"wrote {tiles.total():,} tiles to {args.output} ({counted}){classes}")
    if not tiles["val"]:
        print(
            "WARNING: no picture is for validation. Tiles of one picture in several splits are similar, so the "
            "score is not reliable: name pictures with --val"
        )
    return 0
